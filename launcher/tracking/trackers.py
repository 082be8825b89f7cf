"""The trackers that ship, by name, and those of users, by import path.

A trial's lines ──► a tracker: all there are, then what comes, until it has ended or nobody wants to go on.

new lines? ──► add ──► flush ──► wait ──► new lines? ...      taken back? ──► another tracker, from the first line on
"""

import json
import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import Any

from corral.experiments.errors import ConfigError
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import LogState
from corral.launcher.files.file_thread import PatientFiles
from corral.launcher.tracking.tracker import MakeTracker, TrackedTrial, emptied, package
from corral.launcher.trial.view import TrialView
from corral.launcher.trial.watchers import findings_of

_WANDB_INIT_TIMEOUT_S = 30.0
_MLFLOW_TAG = "corral_trial"
_MOST_METRICS = 1000  # in a request to MLflow
_LONGEST_NAME = 240  # of the 250 characters that MLflow takes; a number that tells two names apart follows
_SECONDS = re.compile(r"time/(?P<part>.+)_s(?P<rest>/.+)?")
_TOTALS = re.compile("data/(samples_trained|samples_dropped|duplicates|dropped/.+)")
"""Numbers that only grow as they stand in a line."""
_SUMMED = ("train/tokens",)
"""Numbers of one step."""
_WATCHED_LINES = 100  # more than any rule looks at
_COMMAND_TIMEOUT_S = 60.0

Sample = tuple[str, tuple[tuple[str, str], ...], float]
"""A name, labels beside those of the trial, and a value: of Prometheus."""


class TensorBoard:
    """Event files in an empty folder: `tensorboard --logdir TRIAL_DIRECTORY/tracking`."""

    def __init__(self, folder: Path, trial: TrackedTrial) -> None:
        """
        Raises:
            ConfigError: if the package is not there.
        """
        self._event = package("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = package("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        writer = package("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = writer.EventFileWriter(str(emptied(folder)))

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._writer.add_event(self._event(wall_time=time_s, step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbRun:
    """Weights & Biases: one run, named by the trial's id, on the server or, where there is no way there, in the folder.

    no key, or no network ──► offline: a .wandb file, which `wandb sync` uploads        else ──► online

    A line is a row of the run's history. Its train step is the number `step`, since rows of Weights & Biases have to
    come in order, and evaluations come after the lines of later steps. Key, server, project, entity and mode are those
    of wandb's own environment variables and files.

    Guarantee: a run that is started under the id of another run, and does not resume it, takes its place. So each line
    is there once. Offline the folder begins empty.
    """

    def __init__(self, folder: Path, trial: TrackedTrial) -> None:
        """
        Raises:
            ConfigError: if the package is not there.
        """
        self._wandb = package("wandb", "wandb")
        emptied(folder)
        chosen = os.environ.get("WANDB_MODE")
        try:
            self._run = self._begin(folder, trial, chosen or "online")
        except self._wandb.errors.Error as error:
            if chosen:
                raise
            print(f"goes on offline, `wandb sync {folder}/wandb/offline-run-*` uploads it: {error}", flush=True)
            self._wandb.teardown()  # the id is in use otherwise
            self._run = self._begin(folder, trial, "offline")
        self._run.define_metric("*", step_metric="step")

    def _begin(self, folder: Path, trial: TrackedTrial, mode: str) -> Any:
        # Nothing is reported of this process itself, which only reads.
        quiet = {"silent": True, "console": "off", "disable_git": True, "disable_code": True, "x_disable_meta": True}
        return self._wandb.init(
            id=trial.uuid,
            project=os.environ.get("WANDB_PROJECT") or trial.experiment,
            name=trial.trial,
            config=dict(trial.config),
            dir=folder,
            mode=mode,
            settings=self._wandb.Settings(init_timeout=_WANDB_INIT_TIMEOUT_S, x_disable_stats=True, **quiet),
        )

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step, "_timestamp": time_s})

    def flush(self) -> None:
        """Its own process sends what it has as soon as it can."""

    def close(self) -> None:
        self._run.finish()


class MLflowRun:
    """MLflow: one run in the store that $MLFLOW_TRACKING_URI names, or in a SQLite file of the folder.

    `mlflow ui --backend-store-uri sqlite:///TRIAL_DIRECTORY/tracking/mlflow/mlflow.db`

    Server, key and name of the experiment are those of MLflow's own environment variables.

    Guarantee: runs that carry the trial's id are deleted before another run begins. So each line is there once in the
    run that is left. MLflow chooses the ids of runs: the trial's is a tag.
    """

    def __init__(self, folder: Path, trial: TrackedTrial) -> None:
        """
        Raises:
            ConfigError: if the package is not there.
        """
        emptied(folder)
        self._metric = package("mlflow.entities", "mlflow").Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        client = package("mlflow.tracking", "mlflow").MlflowClient(uri or f"sqlite:///{folder}/mlflow.db")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or trial.experiment
        if (experiment := client.get_experiment_by_name(name)) is not None:
            number = experiment.experiment_id
        else:
            number = client.create_experiment(name, None if uri else str(folder / "artifacts"))
        while found := client.search_runs([number], f"tags.{_MLFLOW_TAG} = '{trial.uuid}'"):
            for run in found:
                client.delete_run(run.info.run_id)
        self._client = client
        self._run = client.create_run(number, run_name=trial.trial, tags={_MLFLOW_TAG: trial.uuid}).info.run_id
        self._waiting: list[Any] = []
        self._name_by_key: dict[str, str] = {}

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._waiting += [
            self._metric(self._name(key), value, int(1000 * time_s), step) for key, value in values.items()
        ]
        if len(self._waiting) >= _MOST_METRICS:
            self.flush()

    def _name(self, key: str) -> str:
        """The name of a metric here, distinct from all others."""
        if key not in self._name_by_key:
            name, taken = mlflow_name(key), set(self._name_by_key.values())
            numbered = (f"{name}_{number}" for number in count(2))
            self._name_by_key[key] = next(one for one in chain([name], numbered) if one not in taken)
        return self._name_by_key[key]

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for at in range(0, len(waiting), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=waiting[at : at + _MOST_METRICS])

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self._run)


def mlflow_name(key: str) -> str:
    """The key of a metric in the letters that MLflow takes, which refuses a whole request for one other.

    Example:
        mlflow_name("eval/pass@4") == "eval/pass_at_4"
    """
    plain = re.sub(r"[^A-Za-z0-9_\-. /]", "_", key.replace("@", "_at_"))
    parts = [part for part in plain.split("/") if part.strip(".")]  # no path out of a folder, and none with gaps
    return "/".join(parts)[:_LONGEST_NAME] or "_"


class PrometheusFile:
    """Prometheus: the newest numbers as one text file, for the textfile collector of node_exporter.

    lines ──► newest value of each, sums of what counts ──flush──► corral-TRIAL_ID.prom, replaced as a whole
    journal, NVML where there is one ──┘

    In $CORRAL_TEXTFILE_DIR, where others may read the file and from where it goes at the end of the trial; else in the
    folder. Names and units follow https://prometheus.io/docs/practices/naming/: what only grows ends in `_total`, and
    seconds of a step are `corral_step_seconds`, by what the step did. GPUs are those of the host that this runs on.
    """

    def __init__(self, folder: Path, trial: TrackedTrial) -> None:
        shared = os.environ.get("CORRAL_TEXTFILE_DIR")
        self._path = Path(shared or emptied(folder)) / f"corral-{trial.uuid}.prom"
        self._is_shared = bool(shared)
        self._directory = trial.directory
        self._journal_bytes = self._restarts = 0
        self._labels = (("experiment", trial.experiment), ("trial", trial.trial))
        self._values: dict[str, float] = {}
        self._written = ""

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        for name in _SUMMED:
            if name in values:
                values = {**values, name: self._values.get(name, 0.0) + values[name]}
        self._values |= values
        self._values["step"] = max(step, self._values.get("step", 0))
        self._values["last_line_timestamp_seconds"] = time_s

    def flush(self) -> None:
        self._count_restarts()
        by_name: dict[str, list[str]] = {}
        for name, labels, value in self._samples():
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in [*self._labels, *labels])
            by_name.setdefault(name, []).append(f"{name}{{{shown}}} {value!r}\n")
        text = "".join(
            f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n{''.join(lines)}"
            for name, lines in by_name.items()
        )
        if text != self._written:
            part = self._path.with_suffix(".part")
            part.write_text(text)
            if self._is_shared:
                part.chmod(0o644)
            part.rename(self._path)
            self._written = text

    def close(self) -> None:
        self.flush()
        if self._is_shared:
            self._path.unlink(missing_ok=True)

    def _count_restarts(self) -> None:
        journal = self._directory.journal_path
        size = journal.stat().st_size if journal.exists() else 0
        if size != self._journal_bytes:
            self._journal_bytes = size
            self._restarts = len(TrialView.open(self._directory).named("unit_restarting"))

    def _samples(self) -> Iterator[Sample]:
        for name, value in self._values.items():
            yield _sample(name, value)
        yield "corral_restarts_total", (), float(self._restarts)
        yield from _gpu_samples()


def _sample(name: str, value: float) -> Sample:
    """A number of metrics.jsonl, as the field would call it."""
    if match := _SECONDS.fullmatch(name):
        return "corral_step_seconds", (("part", match["part"] + (match["rest"] or "")),), value
    total = "_total" if name in _SUMMED or _TOTALS.fullmatch(name) else ""
    return "corral_" + re.sub(r"\W", "_", name) + total, (), value


def _gpu_samples() -> Iterator[Sample]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no package, no driver, no GPU: each has an error of its own
        return
    for index, handle in enumerate(handles):
        memory, labels = pynvml.nvmlDeviceGetMemoryInfo(handle), (("gpu", str(index)), ("node", os.uname().nodename))
        yield "corral_gpu_memory_used_bytes", labels, float(memory.used)
        yield "corral_gpu_memory_bytes", labels, float(memory.total)
        yield "corral_gpu_utilization_ratio", labels, pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class NewsCommand:
    """A program of the user's own, started whenever a rule of the watchers begins to speak of the last train steps.

    lines ──last ones──► rules ──one that did not speak before──► program ◄── {"trial", "step", "text", "remedy"}

    An e-mail or a message to a room is the program's. The tracker starts the program once for each beginning, and once
    more for what is still so when the tracker is started again. If a program fails or takes too long, the log
    says so, and nothing else happens.
    """

    def __init__(self, folder: Path, trial: TrackedTrial) -> None:
        self._command = tuple(trial.config["tracking"]["command"])
        self._name = f"{trial.experiment}/{trial.trial}"
        self._lines = deque[dict[str, Any]](maxlen=_WATCHED_LINES)
        self._speaking: set[str] = set()

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._lines.append({"step": step, "time": time_s, **values})

    def flush(self) -> None:
        findings = {finding.topic: finding for finding in findings_of(self._lines, trial=self._name)}
        for topic in findings.keys() - self._speaking:
            found = findings[topic]
            message = {"trial": self._name, "step": found.step, "text": found.text, "remedy": found.details}
            self._run(json.dumps(message) + "\n")
        self._speaking = set(findings)

    def close(self) -> None:
        self.flush()

    def _run(self, line: str) -> None:
        print(f"{self._command[0]}: {line}", end="", flush=True)
        try:
            subprocess.run(self._command, input=line, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            print(error, flush=True)


TRACKERS: Mapping[str, MakeTracker] = {
    "tensorboard": TensorBoard,
    "wandb": WandbRun,
    "mlflow": MLflowRun,
    "prometheus": PrometheusFile,
    "command": NewsCommand,
}


def tracker_named(name: str) -> MakeTracker:
    """One of `TRACKERS`, or that of an import path.

    Raises:
        ConfigError: if there is none.
    """
    if name in TRACKERS:
        return TRACKERS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError.of(f"there is no tracker {name!r}", hint=f"{', '.join(TRACKERS)}, or package.module:name")
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError.of(f"{name} cannot be imported: {error}", hint="it is looked for as Python does") from error
    made: MakeTracker = found
    return made


LOOK_S = 2.0


Line = dict[str, Any]
_CHUNK_BYTES = 8 << 20  # of a long trial, memory for some lines at a time


class CommittedLines:
    """The lines of metrics.jsonl that stay, since a commit covers them: each once, in the order of writing.

    metrics.jsonl   ████████████████░░░░      what a failure may still take back is not read
                                    ▲ bytes that the newest commit's manifest says; all of them once the trial is done
    """

    def __init__(self, directory: TrialDirectory) -> None:
        self._directory = directory
        self._log = TrialLog(directory.log_path)
        self._read_bytes = self._slot = 0
        self.begins_anew = False
        """Whether the last call began with the first line again, as the trial has fallen back behind reported lines."""

    @property
    def is_done(self) -> bool:
        """Whether the trial had been trained to its end when lines were last read."""
        return self._log.state.is_done

    def new(self) -> Iterator[Line]:
        """Those since the last call, or the first ones of many; none once all were given.

        Raises:
            OSError: if a file cannot be read; no line is lost by it.
        """
        state = self._log.read()
        self.begins_anew = self._is_taken_back(state)
        if self.begins_anew:
            self._read_bytes = 0
        end = self._committed_bytes(state)
        if end is not None and end <= self._read_bytes:
            return
        try:
            with self._directory.metrics_path.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read(_CHUNK_BYTES if end is None else min(_CHUNK_BYTES, end - self._read_bytes))
        except FileNotFoundError:
            return
        data = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(data)
        yield from map(json.loads, data.splitlines())

    def _is_taken_back(self, state: LogState) -> bool:
        """Guarantee: the lines reported up to a commit stay as long as the commit is in the lineage. If it is not,
        since its checkpoint was damaged or it is too old to be remembered, all lines are reported again."""
        before, self._slot = self._slot, state.head
        return before != 0 and all(logged.slot != before for logged in state.lineage)

    def _committed_bytes(self, state: LogState) -> int | None:
        """None: all."""
        if state.is_done:
            return None
        if (commit := state.last_commit) is None:
            return 0
        manifest = self._directory.inside(commit.directory) / "manifest.json"
        try:
            return int(json.loads(manifest.read_bytes())["extra"]["lines"]["metrics"])
        except FileNotFoundError:  # a newer commit has just taken its place
            return self._read_bytes


def hand_on(trial: TrackedTrial, to: str, *, wait: Callable[[float], bool], files: PatientFiles) -> int:
    """Hands numbers on; how many lines there were.

    Args:
        to: name or import path of the tracker.
        wait: waits for so many seconds, less once it is time to end; whether to go on after one more look. Lines that
            were written before it returned false are reported.

    Raises:
        ConfigError: if there is no such tracker.
        TimeoutError, OSError: if the trial's files cannot be read.
    """
    make, lines = tracker_named(to), CommittedLines(trial.directory)
    folder = trial.directory.path / "tracking" / to.replace(":", ".")
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    tracker, num_lines, goes_on = make(folder, trial), 0, True
    while True:
        new = files.run(lambda: list(lines.new()), trial.directory.path)
        if lines.begins_anew:
            tracker.close()
            tracker, num_lines = make(folder, trial), 0
        for line in new:
            tracker.add(int(line["step"]), float(line["time"]), _numbers(line))
        num_lines += len(new)
        if new:
            continue
        tracker.flush()
        if lines.is_done or not goes_on:
            tracker.close()
            return num_lines
        goes_on = wait(LOOK_S)


def _numbers(line: dict[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    }
