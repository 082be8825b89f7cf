"""Workers that use more memory than their group asks for, on a SLURM that has the kernel end them for it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from corral.experiments.exit_codes import WorkerExit
from tests.slurm.cluster import MEMORY_GROUPS, Cluster, running_cluster
from tests.slurm.conftest import require_programs

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    require_programs(accounts=False)
    if os.getuid() != 0 or not os.access(MEMORY_GROUPS / "cgroup.procs", os.W_OK):
        pytest.skip(f"SLURM makes memory cgroups as root, below {MEMORY_GROUPS} (version 1), and cannot here")
    with running_cluster(num_nodes=1, limits_memory=True) as cluster:
        yield cluster


def test_a_worker_that_the_kernel_ends_for_its_memory_is_said_to_have_had_too_little(
    make_slurm_trial: Any,
) -> None:
    """srun ends with 1 whoever was killed, the worker or a process of its own: the worker's guard knows."""
    trial = make_slurm_trial(
        {
            "master_worker/0": ["master"],
            "generation_server/0": ["served 600"],
            "generation_server/1": ["eat 600", "wait"],
        },
        model_workers=1,
        servers=2,
        task={"mem": 256},
        supervision={"max_restarts": 1},
    )
    trial.submit()
    status = trial.wait_for_state("OOM", "FAILED", "COMPLETE", "LOST")
    assert status.state == "OOM" and "groups.generation_server.scheduling.mem" in status.note, trial.events()
    ends = trial.events("task_ended", who="generation_server/0")
    assert [end["code"] for end in ends] == [WorkerExit.OUT_OF_MEMORY] * 2
    assert trial.events("task_ended", who="generation_server/1")[0]["code"] == WorkerExit.OUT_OF_MEMORY
    restarts = trial.events("unit_restarting")
    assert {event["unit"] for event in restarts} == {"generation_server/0", "generation_server/1"}
    assert all("needed more memory than its group asks for" in event["cause"] for event in restarts)
    others = [event for event in trial.events("task_ended") if not event["who"].startswith("generation_server/")]
    assert all(event["code"] != WorkerExit.OUT_OF_MEMORY for event in others), others
