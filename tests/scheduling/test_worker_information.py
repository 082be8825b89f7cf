"""Worker names, their place in the worker graph, and the states of a trial."""

import pytest
from pydantic import ValidationError

from corral.scheduling.worker_information import WORKER_KINDS, ExpStatus, WorkerInformation, parse_worker_id, worker_id


def test_worker_ids_read_back() -> None:
    assert worker_id("rollout_worker", 3) == "rollout_worker/3"
    assert [parse_worker_id(worker_id(kind, 12)) for kind in WORKER_KINDS] == [(kind, 12) for kind in WORKER_KINDS]


@pytest.mark.parametrize(
    "text",
    [
        "rollout_worker",
        "rollout_worker/",
        "rollout_worker/-1",
        "rollout_worker/01",
        "cook/1",
        "x/1/2",
        "model_worker/1\n",
    ],
)
def test_other_worker_ids_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be KIND/INDEX"):
        parse_worker_id(text)


def test_a_worker_knows_its_place() -> None:
    worker = WorkerInformation(
        experiment="e", trial="t", kind="model_worker", index=1, count=2, watch_keys=("workers/master",)
    )
    assert worker.worker_id == "model_worker/1"
    assert WorkerInformation.model_validate_json(worker.model_dump_json()) == worker
    with pytest.raises(ValidationError, match="worker index 2 of kind model_worker must be below its count 2"):
        WorkerInformation(experiment="e", trial="t", kind="model_worker", index=2, count=2)


def test_only_final_states_end_workers() -> None:
    assert [status.value for status in ExpStatus if status.is_final] == ["COMPLETE", "ABORTED", "STOPPED"]
