"""All five groups on some nodes: every step is where the layout says, with the GPUs that it says.

sglang:d2t2+fsdp:d4 on nodes of 4 GPUs ──► 1 node of 2 servers with 2 GPUs each, 2 nodes of 2 ranks with 2 each
sglang:d2t3+fsdp:d2                    ──► 2 nodes of 1 server with 3 GPUs, and a rank on the fourth
"""

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.config.cluster import GroupConfig, LaunchConfig
from corral.experiments.config.data import DatasetConfig
from corral.experiments.config.model import ActorModelConfig
from corral.launcher.slurm.parse import parse_key_values
from corral.launcher.slurm.srun import step_name
from corral.scheduling.scheduling import ExperimentScheduling
from corral.scheduling.slurm_formats import expand_host_list
from tests.launcher.trials import stop_and_wait, wait_until
from tests.slurm.cluster import Cluster, running_cluster
from tests.slurm.conftest import require_programs
from tests.slurm.trials import SMALL, SlurmTrial

pytestmark = pytest.mark.slurm

ROLLOUT_WORKERS = 1
SERVERS_OF_TWO_GPUS = "sglang:d2t2+fsdp:d4"
SERVERS_OF_THREE_GPUS = "sglang:d2t3+fsdp:d2"
TWO_GPUS = {"gpu": 2}
# SLURM may give workers of one size that share a node each other's GPUs; `slice` gives each its own.
BINDINGS = pytest.mark.parametrize("binding", ["per_task", pytest.param("slice", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """A cluster of their own: these tests fill nodes of four GPUs."""
    require_programs(accounts=False)
    with running_cluster(gpus=4) as cluster:
        yield cluster


@pytest.fixture
def make_five_groups(make_slurm_trial: Any) -> Iterator[Callable[..., SlurmTrial]]:
    """Makes trials of the groups that an allocation asks for, each small; `fields` are by group."""
    made: list[SlurmTrial] = []

    def make(allocation: str, *, launch: Mapping[str, Any] | None = None, **fields: Mapping[str, Any]) -> SlurmTrial:
        groups = groups_of(allocation)
        trial: SlurmTrial = make_slurm_trial(
            {"master_worker/0": ["master"]},
            model_workers=groups["model_worker"].count,
            servers=groups["generation_server"].count,
            rollout_workers=ROLLOUT_WORKERS,
            cluster=SMALL["cluster"] | {"gpus_per_node": 4},
        )
        made.append(trial)
        changed = {
            kind: group.model_copy(
                update={
                    "scheduling": group.scheduling.model_copy(update={"cpu": 1, "mem": 200, **fields.get(kind, {})})
                }
            )
            for kind, group in groups.items()
        }
        trial.replan(scheduling=ExperimentScheduling(**changed), launch=LaunchConfig(**(launch or {})))
        return trial

    yield make
    for trial in made:
        if trial.job_id:
            stop_and_wait(trial.facts, now=True)


def groups_of(allocation: str) -> ExperimentScheduling:
    """What an experiment with this allocation asks for."""
    experiment = AsyncPPOExperiment(
        name="exp",
        allocation=allocation,
        actor=ActorModelConfig(path=Path("model")),
        dataset=DatasetConfig(path=Path("rows.jsonl")),
        groups={"rollout_worker": GroupConfig(count=ROLLOUT_WORKERS)},
    )
    return experiment.scheduling_setup()


def worker_environments(trial: SlurmTrial) -> dict[str, dict[str, str]]:
    """What each worker was started with, once all of them run."""
    return {
        worker: _environment(wait_until(partial(trial.starts, worker), f"the start of {worker}")[0][0])
        for worker in trial.layout.steps
    }


def hosts_by_allocation(trial: SlurmTrial, cluster: Cluster) -> dict[int, list[str]]:
    """Nodes of every allocation, as SLURM shows them."""
    if trial.layout.kind == "jobs":
        jobs_by_name = {job.tag.get("allocation"): job for job in trial.jobs}
        names = [allocation.name for allocation in trial.layout.allocations]
        return {index: expand_host_list(jobs_by_name[name].nodes) for index, name in enumerate(names)}
    # Components follow each other by their job ids.
    lines = cluster.run("scontrol", "show", "job", "-o", trial.job_id).stdout.splitlines()
    jobs = sorted((parse_key_values(line) for line in lines), key=lambda job: int(job["JobId"]))
    return {index: expand_host_list(job["NodeList"]) for index, job in enumerate(jobs)}


def check_nodes_and_steps(trial: SlurmTrial, cluster: Cluster, environments: Mapping[str, Mapping[str, str]]) -> None:
    assert {environment["CORRAL_BIND_ADDRESS"] for environment in environments.values()} == {"127.0.0.1"}
    hosts = hosts_by_allocation(trial, cluster)
    planned = {worker: hosts[step.allocation][step.node_index] for worker, step in trial.layout.steps.items()}
    assert {worker: environment["SLURMD_NODENAME"] for worker, environment in environments.items()} == planned
    shown = cluster.run("squeue", "-h", "-s", "-o", "%j|%N").stdout.split()
    assert sorted(line for line in shown if not line.startswith(("batch|", "extern|"))) == sorted(
        f"{step_name(worker)}|{node}" for worker, node in planned.items()
    )


def gpus_of(environment: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(int(index) for index in environment["CUDA_VISIBLE_DEVICES"].split(",") if index)


def check_gpus(trial: SlurmTrial, environments: Mapping[str, Mapping[str, str]]) -> None:
    """Each worker has as many GPUs as planned, and on each node the shares are the planned ones; sliced, its own."""
    planned, given = defaultdict(list), defaultdict(list)
    for worker, step in trial.layout.steps.items():
        gpus = gpus_of(environments[worker])
        assert len(gpus) == step.gpus, worker
        assert step.gpu_binding != "slice" or gpus == step.gpu_indices, worker
        planned[step.allocation, step.node_index].append(step.gpu_indices)
        given[step.allocation, step.node_index].append(gpus)
    assert {node: sorted(shares) for node, shares in given.items()} == {
        node: sorted(shares) for node, shares in planned.items()
    }


def servers_by_node(trial: SlurmTrial) -> list[list[tuple[int, ...]]]:
    """The planned GPUs of the servers, by the nodes that they are on."""
    by_node: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for worker, step in trial.layout.steps.items():
        if worker.startswith("generation_server/"):
            by_node.setdefault((step.allocation, step.node_index), []).append(step.gpu_indices)
    return list(by_node.values())


@BINDINGS
def test_packed_puts_every_step_on_its_node_with_its_share_of_gpus(
    make_five_groups: Callable[..., SlurmTrial], cluster: Cluster, binding: str
) -> None:
    trial = make_five_groups(SERVERS_OF_TWO_GPUS, model_worker=TWO_GPUS, generation_server={"gpu_binding": binding})
    assert (trial.layout.kind, trial.layout.head.num_nodes) == ("packed", 3)
    assert servers_by_node(trial) == [[(0, 1), (2, 3)]]
    trial.submit()
    environments = worker_environments(trial)
    check_nodes_and_steps(trial, cluster, environments)
    check_gpus(trial, environments)


def test_sliced_workers_get_exactly_the_gpus_of_the_plan(
    make_five_groups: Callable[..., SlurmTrial], cluster: Cluster
) -> None:
    trial = make_five_groups(SERVERS_OF_THREE_GPUS, model_worker={"gpu_binding": "slice"})
    assert servers_by_node(trial) == [[(0, 1, 2)]] * 2
    assert {step.gpu_binding for step in trial.layout.steps.values() if step.gpus} == {"slice"}
    trial.submit()
    environments = worker_environments(trial)
    check_nodes_and_steps(trial, cluster, environments)
    check_gpus(trial, environments)


@BINDINGS
def test_hetjob_puts_every_step_into_its_component(
    make_five_groups: Callable[..., SlurmTrial], cluster: Cluster, binding: str
) -> None:
    trial = make_five_groups(
        SERVERS_OF_TWO_GPUS,
        model_worker=TWO_GPUS | {"partition": "spot"},
        generation_server={"gpu_binding": binding},
    )
    layout = trial.layout
    assert layout.kind == "hetjob"
    assert [(allocation.role, allocation.num_nodes) for allocation in layout.allocations] == [
        ("head", 1),
        ("component", 2),
    ]
    assert servers_by_node(trial) == [[(0, 1), (2, 3)]]
    trial.submit()
    environments = worker_environments(trial)
    check_nodes_and_steps(trial, cluster, environments)
    check_gpus(trial, environments)
    assert {job.tag["allocation"] for job in trial.jobs} >= {"head"}
    partitions = cluster.run("squeue", "-h", "-n", "exp.trial,exp.trial.model_worker", "-o", "%P").stdout.split()
    assert sorted(partitions) == ["debug", "spot"]
    os.kill(trial.starts("model_worker/1")[0][0], signal.SIGKILL)  # a step of a component
    wait_until(lambda: len(trial.starts("model_worker/1")) == 2, "its second start")
    assert len(trial.starts("master_worker/0")) == len(trial.starts("generation_server/0")) == 1


@BINDINGS
def test_jobs_puts_every_step_into_the_job_of_its_group(
    make_five_groups: Callable[..., SlurmTrial], cluster: Cluster, binding: str
) -> None:
    trial = make_five_groups(
        SERVERS_OF_TWO_GPUS,
        launch={"layout": "jobs"},
        model_worker=TWO_GPUS,
        generation_server={"gpu_binding": binding},
    )
    assert [allocation.role for allocation in trial.layout.allocations] == ["head", "group", "group", "group"]
    assert servers_by_node(trial) == [[(0, 1), (2, 3)]]
    trial.submit()
    environments = worker_environments(trial)
    check_nodes_and_steps(trial, cluster, environments)
    check_gpus(trial, environments)
    assert stop_and_wait(trial.facts, grace_s=20.0).state == "STOPPED"
    wait_until(lambda: not cluster.run("squeue", "-h", "-t", "PD,R,CG").stdout.strip(), "the end of all four jobs")


def _environment(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return dict(entry.split("=", 1) for entry in file.read().decode().split("\0") if "=" in entry)
