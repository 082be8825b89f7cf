"""Sites that count resources in other ways: cores of two threads, and memory that is asked for per CPU only."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.launcher.layout.planner import plan_layout
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.submit.cluster import most_common_shape
from tests.launcher.trials import stop_and_wait, wait_until
from tests.slurm.cluster import Cluster, running_cluster
from tests.slurm.conftest import for_this_process
from tests.slurm.trials import SMALL, SlurmTrial

pytestmark = pytest.mark.slurm

ONLY_PER_CPU = """
function slurm_job_submit(job, partition, uid)
   if job.min_mem_per_cpu == nil then
      slurm.log_user("ask for memory by --mem-per-cpu")
      return slurm.ERROR
   end
   return slurm.SUCCESS
end
function slurm_job_modify(job, record, partition, uid)
   return slurm.SUCCESS
end
"""


@pytest.fixture(scope="module")
def per_cpu_cluster() -> Iterator[Cluster]:
    with running_cluster(num_nodes=1, gpus=0, job_submit=ONLY_PER_CPU, settings={"MaxMemPerCPU": 1000}) as cluster:
        yield cluster


def _workers(trial: SlurmTrial) -> list[str]:
    return [f"{spec.kind}/{spec.index}" for spec in trial.plan.workers]


def _wait_for_all(trial: SlurmTrial) -> None:
    for worker in _workers(trial):
        wait_until(lambda worker=worker: trial.starts(worker), f"the start of {worker}")  # type: ignore[misc]


def test_every_step_gets_its_cores_where_a_core_is_two_cpus(make_slurm_trial: Any, threaded_cluster: Cluster) -> None:
    client = SlurmClient()
    shape = most_common_shape(client.nodes())
    assert shape is not None
    # Six workers of one CPU each, in an allocation of 7 CPUs, would be six steps for four cores: two would never start.
    trial = make_slurm_trial({"master_worker/0": ["master"]}, model_workers=3)
    trial.placed = replace(trial.placed, layout=plan_layout(trial.plan, {None: shape}))
    assert {step.cpus for step in trial.layout.steps.values()} == {2}
    trial.submit()
    _wait_for_all(trial)
    assert len(client.steps(trial.job_id)) == len(_workers(trial)) == 6
    stop_and_wait(trial.facts, now=True)


def test_memory_is_asked_for_per_cpu_where_jobs_may_ask_for_nothing_else(
    per_cpu_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for_this_process(per_cpu_cluster, monkeypatch)
    refused = SlurmTrial(tmp_path / "refused", {}, **SMALL)
    refused.prepare_files()
    with pytest.raises(SlurmError, match="ask for memory by --mem-per-cpu"):
        SlurmClient().test_submission([], refused.directory.sbatch_path)
    trial = SlurmTrial(
        tmp_path, {"master_worker/0": ["finish 1"]}, **(SMALL | {"cluster": {**SMALL["cluster"], "mem_request": "cpu"}})
    )
    trial.submit()
    _wait_for_all(trial)
    assert trial.wait_for_state("COMPLETE", "FAILED", "LOST").state == "COMPLETE", trial.events()
    trial.close()
