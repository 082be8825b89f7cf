"""What trackers have recorded of a trial, each read by its own means, beside metrics.jsonl."""

import os
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from corral.experiments.trial.directory import TrialDirectory
from tests.workers.master.trials import lines_of

Recorded = Mapping[str, list[tuple[int, float]]]
"""By the name of a number: each step that has it, and its value, in the order of steps."""

_BLOCK_BYTES, _HEADER_BYTES = 32768, 7  # of LevelDB's log format, which .wandb files have
_WHOLE, _LAST = 1, 4


def written(directory: TrialDirectory) -> Recorded:
    """What metrics.jsonl says."""
    found = defaultdict(list)
    for line in lines_of(directory.metrics_path):
        for name, value in line.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                found[name].append((line["step"], float(value)))
    return _sorted(found)


def in_tensorboard(directory: TrialDirectory) -> Recorded:
    events = EventAccumulator(str(directory.path / "tracking" / "tensorboard"))
    events.Reload()
    return _sorted({name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]})


def in_wandb(directory: TrialDirectory) -> Recorded:
    """Of the one run that there is, which has the trial's id."""
    uuid = TrialDirectory(directory.path).plan_path.read_text().split('"uuid": "')[1][:32]
    (path,) = directory.path.glob("tracking/wandb/wandb/offline-run-*/run-*.wandb")
    assert path.stem == f"run-{uuid}"
    found = defaultdict(list)
    for record in _wandb_records(path):
        row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for name, text in row.items():
            if not name.startswith("_") and name != "step":
                found[name].append((int(row["step"]), float(text.strip('"'))))
    return _sorted(found)


def in_mlflow(directory: TrialDirectory) -> Recorded:
    """Of the one run that is left."""
    from mlflow.tracking import MlflowClient  # which `make test` does not install

    own = f"sqlite:///{directory.path}/tracking/mlflow/mlflow.db"
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", own))
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return _sorted(
        {
            name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
    )


def in_prometheus(path: Path) -> dict[str, float]:
    """The value of every series, by its name and the labels that are not the trial's."""
    found = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            assert {"experiment", "trial"} <= sample.labels.keys() and family.type in ("counter", "gauge")
            labels = [value for name, value in sample.labels.items() if name not in ("experiment", "trial")]
            found["/".join([sample.name, *labels])] = sample.value
    return found


def check_same(recorded: Recorded, expected: Recorded) -> None:
    """Each step once, and nothing else."""
    assert recorded.keys() == expected.keys()
    for name, values in expected.items():
        assert [step for step, _ in recorded[name]] == [step for step, _ in values], name
        seen = [value for _, value in recorded[name]]
        assert seen == pytest.approx([value for _, value in values], rel=1e-5, nan_ok=True), name


def _sorted(values: Recorded) -> Recorded:
    return {name: sorted(of_name) for name, of_name in values.items()}


def _wandb_records(path: Path) -> Iterator[Record]:
    data, at, content = path.read_bytes(), _HEADER_BYTES, b""
    while at + _HEADER_BYTES <= len(data):
        if (left := _BLOCK_BYTES - at % _BLOCK_BYTES) < _HEADER_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        content += data[at + _HEADER_BYTES : at + _HEADER_BYTES + size]
        at += _HEADER_BYTES + size
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(content)
            content = b""
