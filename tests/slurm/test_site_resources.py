"""Sites that count resources in other ways: cores of two threads, cores that are kept, memory per CPU or not at all."""

import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.errors import UnsatisfiableError
from corral.launcher.layout.planner import plan_layout
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.submit.cluster import most_common_shape
from corral.launcher.submit.plan_text import describe
from corral.launcher.submit.preflight import check_on_slurm
from tests.launcher.trials import stop_and_wait, wait_until
from tests.slurm.cluster import Cluster, running_cluster
from tests.slurm.conftest import for_this_process
from tests.slurm.test_doctor import rl_doctor
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


SITES: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "memory is not counted": (
        {"mem_mb": 1, "settings": {"SelectTypeParameters": "CR_Core"}},
        "1 x 4 CPUs;",
        "wants 9 CPUs in one task; the biggest node of partition 'debug' has 8",
    ),
    "cores are kept": (
        {"of_nodes": "CoreSpecCount=2 MemSpecLimit=1000"},
        "1 x 4 CPUs, 3.051 GiB;",
        "has 6 (n1, n2; 6 of 8 CPUs (CoreSpecCount))",
    ),
    "memory takes CPUs": ({"settings": {"MaxMemPerCPU": 500}}, "1 x 7 CPUs, 3.051 GiB;", "8 CPUs x MaxMemPerCPU 500"),
    "whole nodes": (
        {"settings": {"SelectType": "select/linear", "SelectTypeParameters": "CR_Memory"}},
        "1 x 4 CPUs, 3.051 GiB;",
        "wants 9 CPUs in one task; the biggest node of partition 'debug' has 8",
    ),
}
"""By what is special: the cluster, what is asked for, and why a worker of 9 CPUs and 5000 MB is refused."""


@pytest.mark.parametrize("name", [*list(SITES)[:-1], pytest.param("whole nodes", marks=pytest.mark.slow)])
def test_a_trial_completes_or_is_refused_by_number_and_rl_doctor_fails_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values, shown, refusal = SITES[name]
    nothing_said = {"cpus_per_node": None, "mem_per_node": None, "gpus_per_node": 0}
    of_trial = {"mode": "slurm", "cluster": nothing_said, "task": {"mem": 700}, "model_workers": 1, "servers": 0}
    with running_cluster(num_nodes=2, gpus=0, **values) as cluster:
        for_this_process(cluster, monkeypatch)
        trial = SlurmTrial(tmp_path / "trial", {"master_worker/0": ["finish 1"]}, **of_trial)
        found = check_on_slurm(trial.plan, trial.directory)
        assert found.layout is not None and describe(found.layout.head).startswith(shown)
        trial.placed = replace(trial.placed, layout=found.layout)
        trial.submit()
        assert trial.wait_for_state("COMPLETE", "FAILED", "LOST").state == "COMPLETE", trial.events()
        trial.close()
        too_big = SlurmTrial(tmp_path / "big", {}, **(of_trial | {"task": {"cpu": 9, "mem": 5000}}))
        with pytest.raises(UnsatisfiableError, match=re.escape(refusal)):
            check_on_slurm(too_big.plan, too_big.directory)
        assert not [one for one in rl_doctor(cluster, tmp_path).values() if one["level"] == "fail"]


def test_no_process_of_a_job_keeps_the_soft_limits_of_the_login_shell(make_slurm_trial: Any) -> None:
    trial = make_slurm_trial({"master_worker/0": ["master"]}, model_workers=1, servers=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1 << 40, hard)
    )  # PropagateResourceLimits is ALL unless a site changes it
    try:
        trial.submit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _wait_for_all(trial)
    limits = {pid: Path(f"/proc/{pid}/limits").read_text() for pid in trial.processes()}
    stop_and_wait(trial.facts, now=True)
    assert len(limits) >= 8  # keeper, supervisor and Redis, and a guard and a worker for each of three
    assert not [pid for pid, text in limits.items() if re.search(r"Max file size +1099511627776 ", text)]


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
