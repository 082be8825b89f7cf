"""Placement: nobody asks a node for more than it has, the mesh stays together, and what cannot fit says why."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.placement import SLACK_MEM_MB, NodeShape, Placement, place
from corral.scheduling.scheduling import ExperimentScheduling, Scheduling, TasksGroup
from corral.scheduling.worker_information import WorkerKind, parse_worker_id

EIGHT_GPUS = NodeShape(cpus=128, gpus=8, mem_mb=1_000_000)


def group(count: int, *, cpu: int = 2, gpu: int = 0, mem: int = 1000) -> TasksGroup:
    return TasksGroup(count=count, scheduling=Scheduling(cpu=cpu, gpu=gpu, mem=mem))


def trial(
    *,
    model_worker: TasksGroup | None = None,
    generation_server: TasksGroup | None = None,
    rollout_worker: TasksGroup | None = None,
) -> ExperimentScheduling:
    return ExperimentScheduling(
        master_worker=group(1, cpu=4, mem=2000),
        gserver_manager=group(1),
        model_worker=model_worker,
        generation_server=generation_server,
        rollout_worker=rollout_worker,
    )


def nodes_of(placement: Placement, kind: WorkerKind) -> list[int]:
    return [place.node for worker, place in placement.slots.items() if parse_worker_id(worker)[0] == kind]


def gpus_of(placement: Placement, kind: WorkerKind) -> list[tuple[int, ...]]:
    return [place.gpus for worker, place in placement.slots.items() if parse_worker_id(worker)[0] == kind]


def test_large_gpu_tasks_come_first_and_small_ones_fill_the_gaps() -> None:
    placement = place(trial(model_worker=group(8, gpu=1), generation_server=group(2, gpu=4)), EIGHT_GPUS)
    assert placement.num_nodes == 2
    assert placement.slots["generation_server/1"].gpus == (4, 5, 6, 7)
    assert nodes_of(placement, "model_worker") == [1] * 8
    assert gpus_of(placement, "model_worker") == [(index,) for index in range(8)]


def test_master_and_manager_run_on_node_zero() -> None:
    placement = place(trial(generation_server=group(5, gpu=8), rollout_worker=group(10)), EIGHT_GPUS)
    assert placement.slots["master_worker/0"] == placement.slots["gserver_manager/0"] == (0, ())


def test_rollout_workers_are_spread_over_the_nodes_of_the_gpu_groups() -> None:
    placement = place(trial(generation_server=group(3, gpu=8), rollout_worker=group(7)), EIGHT_GPUS)
    assert placement.num_nodes == 3
    assert nodes_of(placement, "rollout_worker") == [0, 1, 2, 0, 1, 2, 0]


def test_a_trial_without_gpus_fits_on_a_laptop() -> None:
    laptop = NodeShape(cpus=9, gpus=0, mem_mb=8000)
    placement = place(trial(model_worker=group(1, cpu=1), rollout_worker=group(1, cpu=1, mem=500)), laptop, max_nodes=1)
    assert placement.num_nodes == 1
    assert gpus_of(placement, "model_worker") == [()]


def test_a_full_node_opens_another_one_as_far_as_there_are_any() -> None:
    small = NodeShape(cpus=8, gpus=0, mem_mb=10_000)
    scheduling = trial(rollout_worker=group(4, cpu=3))
    assert place(scheduling, small).num_nodes == 3
    with pytest.raises(ValueError) as refusal:
        place(scheduling, small, max_nodes=2)
    message = str(refusal.value)
    assert "rollout_worker/2 wants 3 CPUs, 0 GPUs and 1000 MB, and the 2 nodes" in message
    assert "node 0: 1 CPUs, 0 GPUs and 5976 MB; node 1: 1 CPUs" in message


@pytest.mark.parametrize(
    ("scheduling", "message"),
    [
        (trial(generation_server=group(1, gpu=9)), "generation_server wants 9 GPUs in one task; a node has 8"),
        (
            trial(model_worker=group(1, cpu=128)),
            "model_worker wants 128 CPUs in one task; a node has 128, of which 1 stays free",
        ),
        (
            trial(rollout_worker=group(1, mem=1_000_000)),
            "rollout_worker wants 1000000 MB in one task; a node has 1000000",
        ),
    ],
)
def test_a_task_larger_than_a_node_is_refused_with_the_numbers(scheduling: ExperimentScheduling, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        place(scheduling, EIGHT_GPUS)
    assert message in str(refusal.value)


def test_node_zero_must_hold_master_and_manager() -> None:
    with pytest.raises(ValueError) as refusal:
        place(trial(), NodeShape(cpus=6, gpus=0, mem_mb=100_000))
    assert "gserver_manager must run on node 0 and wants 2 CPUs" in str(refusal.value)
    assert "there are 1 CPUs, 0 GPUs and 96976 MB left on it beside master_worker" in str(refusal.value)


def test_servers_of_several_gpus_fill_nodes_and_none_straddles_two() -> None:
    four = replace(EIGHT_GPUS, gpus=4)
    placement = place(trial(model_worker=group(8, gpu=1), generation_server=group(4, gpu=2)), four)
    assert placement.num_nodes == 4
    servers = [placement.slots[f"generation_server/{index}"] for index in range(4)]
    assert servers == [(0, (0, 1)), (0, (2, 3)), (1, (0, 1)), (1, (2, 3))]
    assert nodes_of(placement, "model_worker") == [2, 2, 2, 2, 3, 3, 3, 3]
    # What one of three leaves on a node is no room for half of another, but for a rank.
    placement = place(trial(model_worker=group(2, gpu=1), generation_server=group(2, gpu=3)), four)
    assert nodes_of(placement, "generation_server") == [0, 1]
    assert gpus_of(placement, "model_worker") == [(3,), (3,)]


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("generation_server", "a server's GPUs are of one node; lower t in the allocation to at most 8"),
        ("model_worker", "lower model_worker's gpu to at most 8"),
    ],
)
def test_a_task_of_more_gpus_than_a_node_has_is_told_how_many_fit(kind: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} wants 9 GPUs in one task; a node has 8.*{remedy}"):
        place(trial(**{kind: group(1, gpu=9)}), EIGHT_GPUS)


groups = st.builds(
    group, st.integers(1, 9), cpu=st.integers(1, 6), gpu=st.sampled_from([0, 0, 1, 2, 3]), mem=st.integers(100, 3000)
)
trials = st.builds(
    trial,
    model_worker=st.none() | groups,
    generation_server=st.none() | groups,
    rollout_worker=st.none() | st.builds(group, st.integers(1, 9), cpu=st.integers(1, 6), mem=st.integers(100, 3000)),
)
NODE = NodeShape(cpus=12, gpus=4, mem_mb=10_000)


@given(trials, st.sampled_from([1, 2, 4]))
def test_every_task_is_placed_once_and_no_node_is_asked_for_more_than_it_has(
    scheduling: ExperimentScheduling, threads_per_core: int
) -> None:
    node_shape = replace(NODE, threads_per_core=threads_per_core)
    placement: Placement = place(scheduling, node_shape)
    cores: dict[int, int] = defaultdict(int)
    mem_mb: dict[int, int] = defaultdict(int)
    gpus: dict[int, list[int]] = defaultdict(list)
    placed = []
    for worker, (node, task_gpus) in placement.slots.items():
        kind, index = parse_worker_id(worker)
        task = scheduling[kind].scheduling
        placed.append((kind, index))
        cores[node] += math.ceil(task.cpu / threads_per_core)
        mem_mb[node] += task.mem
        gpus[node] += task_gpus
        assert len(task_gpus) == task.gpu
        assert list(task_gpus) == list(range(min(task_gpus, default=0), min(task_gpus, default=0) + task.gpu))
    assert placed == [(kind, index) for kind, tasks in scheduling.items() for index in range(tasks.count)]
    assert set(cores) == set(range(placement.num_nodes))
    for node in cores:
        assert (cores[node] + 1) * threads_per_core <= NODE.cpus  # one core is the supervisor's
        assert mem_mb[node] <= NODE.mem_mb - SLACK_MEM_MB
        assert len(set(gpus[node])) == len(gpus[node]) and set(gpus[node]) <= set(range(NODE.gpus))
    assert place(scheduling, node_shape, max_nodes=placement.num_nodes) == placement
