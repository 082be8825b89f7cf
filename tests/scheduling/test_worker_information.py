"""Names of workers."""

import pytest

from corral.scheduling.worker_information import WORKER_KINDS, parse_worker_id, worker_id


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
