"""Nodes that fail under an allocation that outlives them: who moves where, who shares, and whom nothing is left for."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.layout.layout import Allocation, Layout, RunningAllocation, Step
from corral.launcher.runners.runner import Task
from corral.launcher.slurm.client import SlurmClient, SlurmUnreachableError
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.parse import Node
from corral.launcher.supervisor.node_loss import (
    NodeLoss,
    Relocation,
    relocate,
    why_over,
)
from corral.launcher.supervisor.recorder import note_failed_node

KINDS = ("master_worker", "model_worker", "generation_server", "gserver_manager", "rollout_worker")
SLACK_CPUS, SLACK_MB = 1, 256  # what the supervisor keeps of the head node


def head(num_nodes: int, *, cpus: int = 8, mem_mb: int = 4000, gpus: int = 0) -> Allocation:
    return Allocation(
        name="head",
        role="head",
        num_nodes=num_nodes,
        cpus_per_node=cpus,
        mem_mb_per_node=mem_mb,
        gpus_per_node=gpus,
    )


def layout(allocation: Allocation, steps: Mapping[str, Step]) -> Layout:
    return Layout(kind="packed", reason="", allocations=(allocation,), steps=dict(steps))


def step(node: int, cpus: int, *, mem_mb: int = 100, gpus: Sequence[int] = ()) -> Step:
    return Step(
        allocation=0, node_index=node, cpus=cpus, mem_mb=mem_mb, gpus=len(gpus), gpu_indices=tuple(gpus)
    )  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Workers of any size, each put on the first node that has room beside the supervisor."""
    shape = head(draw(st.integers(1, 4)), cpus=draw(st.integers(2, 8)), gpus=draw(st.integers(0, 4)))
    steps: dict[str, Step] = {}
    free = [[shape.cpus_per_node, shape.mem_mb_per_node, 0] for _ in range(shape.num_nodes)]
    free[0][0] -= SLACK_CPUS
    free[0][1] -= SLACK_MB
    workers = draw(
        st.lists(
            st.tuples(st.sampled_from(KINDS), st.integers(1, 6), st.integers(1, 3000), st.integers(0, 3)), max_size=10
        )
    )
    for index, (kind, cpus, mem_mb, gpus) in enumerate(workers):
        for node, (left_cpus, left_mb, next_gpu) in enumerate(free):
            if cpus <= left_cpus and mem_mb <= left_mb and next_gpu + gpus <= shape.gpus_per_node:
                steps[f"{kind}/{index}"] = step(node, cpus, mem_mb=mem_mb, gpus=range(next_gpu, next_gpu + gpus))
                free[node] = [left_cpus - cpus, left_mb - mem_mb, next_gpu + gpus]
                break
    return layout(shape, steps)


def used(steps: Mapping[str, Step], node: int) -> tuple[int, int, list[int]]:
    here = [one for one in steps.values() if one.node_index == node]
    gpus = [gpu for one in here for gpu in one.gpu_indices]
    return sum(one.cpus for one in here), sum(one.mem_mb for one in here), gpus


@settings(max_examples=200, deadline=None)
@given(given_layout=layouts(), losses=st.lists(st.integers(0, 3), max_size=3, unique=True))
def test_whatever_nodes_are_lost_no_node_is_overcommitted_and_who_has_no_room_found_nothing_free(
    given_layout: Layout, losses: list[int]
) -> None:
    shape, steps, lost = given_layout.head, dict(given_layout.steps), set[int]()
    for node in losses:
        lost.add(node)
        homeless = {worker for worker, one in steps.items() if one.node_index in lost}
        found = relocate(given_layout, steps, lost)
        assert sorted([*found.moves, *found.without_room]) == sorted(homeless)
        assert all(one.node_index not in lost for one in found.moves.values())
        for worker, moved in found.moves.items():
            elsewhere = {"node_index": moved.node_index, "gpu_indices": moved.gpu_indices}
            assert moved == msgspec.structs.replace(steps[worker], **elsewhere)
            assert len(moved.gpu_indices) == steps[worker].gpus
        kept = {worker: one for worker, one in steps.items() if worker not in homeless} | dict(found.moves)
        for index in [index for index in range(shape.num_nodes) if index not in lost]:
            cpus, mem_mb, gpus = used(kept, index)
            slack = (SLACK_CPUS, SLACK_MB) if index == 0 else (0, 0)
            assert cpus + slack[0] <= shape.cpus_per_node and mem_mb + slack[1] <= shape.mem_mb_per_node
            assert len(gpus) == len(set(gpus)) and set(gpus) <= set(range(shape.gpus_per_node))
            for worker in found.without_room:
                assert (
                    cpus + steps[worker].cpus + slack[0] > shape.cpus_per_node
                    or mem_mb + steps[worker].mem_mb + slack[1] > shape.mem_mb_per_node
                    or len(gpus) + steps[worker].gpus > shape.gpus_per_node
                ), f"{worker} had room on node {index}"
        steps = kept


THREE_NODES = layout(
    head(3),
    {
        "master_worker/0": step(0, 1),
        "model_worker/0": step(0, 5),
        "generation_server/0": step(1, 4, gpus=()),
        "rollout_worker/0": step(1, 2),
        "generation_server/1": step(2, 4),
    },
)


def test_who_has_nobody_to_stand_in_for_it_moves_first() -> None:
    found = relocate(THREE_NODES, THREE_NODES.steps, {1})
    assert found.moves == {"rollout_worker/0": step(2, 2)}
    assert found.without_room == ("generation_server/0",)


def test_the_largest_chooses_first() -> None:
    steps = {
        "master_worker/0": step(0, 5),
        "rollout_worker/1": step(0, 1),
        "generation_server/1": step(1, 1),
        "rollout_worker/0": step(2, 1),
        "generation_server/0": step(2, 7),
    }
    found = relocate(layout(head(3), steps), steps, {2})
    assert found.moves == {"generation_server/0": step(1, 7), "rollout_worker/0": step(0, 1)}


def test_workers_with_gpus_get_free_ones_or_none() -> None:
    steps = {
        "master_worker/0": step(0, 1),
        "generation_server/0": step(0, 1, gpus=(0, 2)),
        "generation_server/1": step(1, 1, gpus=(0, 1)),
        "rollout_worker/0": step(1, 1, gpus=(2,)),
    }
    found = relocate(layout(head(2, gpus=4), steps), steps, {1})
    assert found.moves["rollout_worker/0"].gpu_indices == (1,)
    assert found.without_room == ("generation_server/1",)
    del steps["rollout_worker/0"]
    assert relocate(layout(head(2, gpus=4), steps), steps, {1}).moves["generation_server/1"].gpu_indices == (1, 3)


def test_another_allocation_is_neither_lost_nor_moved_to() -> None:
    other = msgspec.structs.replace(head(1), name="model_worker", role="component")
    steps = {
        "master_worker/0": step(0, 8),
        "generation_server/0": step(1, 8),
        "model_worker/0": msgspec.structs.replace(step(0, 1), allocation=1),
    }
    both = Layout(kind="hetjob", reason="", allocations=(head(2), other), steps=steps)
    assert relocate(both, steps, {1}) == Relocation(without_room=("generation_server/0",))


@pytest.mark.parametrize(
    ("without_room", "given_up", "why"),
    [
        ((), (), ""),
        (("generation_server/0",), (), ""),
        (("generation_server/0",), ("generation_server/1",), "no generation_server is left"),
        (("generation_server/0", "generation_server/1"), (), "no generation_server is left"),
        (("model_worker/0",), (), "model_worker/0 has no room on the nodes that are left"),
        (("master_worker/0",), (), "master_worker/0 has no room"),
        (("generation_server/0", "rollout_worker/0"), (), "no rollout_worker is left"),
    ],
)
def test_a_server_or_rollout_worker_can_be_done_without_while_another_is_left(
    without_room: tuple[str, ...], given_up: tuple[str, ...], why: str
) -> None:
    left = {worker: one for worker, one in THREE_NODES.steps.items() if worker not in (*without_room, *given_up)}
    found = why_over(left, without_room)
    assert found.startswith(why) and bool(found) == bool(why)


class Client(SlurmClient):
    """SLURM, as far as lost nodes are concerned."""

    def __init__(self, left: str | None = "n[1-3]", states: Mapping[str, str] | None = None) -> None:
        self.left = left
        self.states = states
        self.is_reachable = True

    def job(self, job_id: str) -> dict[str, str] | None:
        if not self.is_reachable:
            raise SlurmUnreachableError("scontrol did not answer within 20 s")
        return None if self.left is None else {"JobId": job_id, "JobState": "RUNNING", "NodeList": self.left}

    def nodes(self, partitions: str | None = None, *, in_detail: bool = False) -> list[Node]:
        if self.states is None:
            raise SlurmUnreachableError("sinfo did not answer within 20 s")
        return [
            Node(
                name=name,
                partition="debug",
                is_default_partition=True,
                cpus=8,
                mem_mb=8000,
                gpus_by_type={},
                features=(),
                state=state,
            )
            for name, state in self.states.items()
        ]


class Runner:
    """Notes where workers are told to go."""

    def __init__(self) -> None:
        self.moved: dict[str, int] = {}

    def move(self, worker: str, step: Step) -> None:
        self.moved[worker] = step.node_index

    def start(self, worker: str, command: Sequence[str], *, environment: Mapping[str, str], log_path: Path) -> Task:
        raise AssertionError("starts are the supervisor's")

    def bind_address(self, worker: str) -> str:
        return ""

    def address_of(self, host: str) -> str:
        return ""

    def wait_for_cluster(self, host: str) -> None:
        raise AssertionError("nothing to wait for")

    def clean_up(self) -> None:
        raise AssertionError("nothing to clean up")


def watched(client: Client) -> tuple[NodeLoss, Runner]:
    runner = Runner()
    running = RunningAllocation(job_id="7", het_group=None, hosts=("n1", "n2", "n3"))
    return NodeLoss(cluster=SlurmCluster(client), layout=THREE_NODES, head=running, runner=runner), runner


def test_a_node_that_slurm_took_out_of_the_job_is_told_once() -> None:
    client = Client()
    loss, _ = watched(client)
    assert loss.look() == []
    client.left = "n[1,3]"
    assert loss.look() == ["n2"] and loss.look() == []
    client.left = "n1"
    assert loss.look() == ["n3"]


def test_what_slurm_does_not_say_is_no_loss() -> None:
    client = Client("n1")
    loss, _ = watched(client)
    client.is_reachable = False
    assert loss.look() == []
    client.is_reachable, client.left = True, None
    assert loss.look() == []
    client.left = ""  # the job waits to run again
    assert loss.look() == []


def test_who_moves_starts_elsewhere_and_one_exit_of_each_is_expected() -> None:
    client = Client("n[1,3]")
    loss, runner = watched(client)
    loss.look()
    found = loss.relocate()
    assert found.why_over == ""
    assert runner.moved == {"rollout_worker/0": 2} and found.without_room == ("generation_server/0",)
    assert loss.host_of(found.moves["rollout_worker/0"]) == "n3"
    assert [loss.explains_end("generation_server/0") for _ in range(2)] == [True, False]
    assert not loss.explains_end("model_worker/0")
    loss.started("rollout_worker/0")  # it had not run when its node left, or its end has been seen
    assert not loss.explains_end("rollout_worker/0")


def test_a_second_loss_counts_what_the_first_one_moved() -> None:
    client = Client("n[1,3]")
    loss, runner = watched(client)
    loss.look()
    loss.relocate()
    client.left = "n1"
    loss.look()
    found = loss.relocate()
    assert set(found.without_room) == {"rollout_worker/0", "generation_server/1"}
    assert found.why_over == "no rollout_worker is left" and found.moves == {}


def test_nodes_are_down_if_slurm_says_so() -> None:
    client = Client(states={"n1": "alloc", "n2": "down*", "n3": "fail", "n4": "down"})
    assert SlurmCluster(client).failed_nodes(["n1", "n2", "n3", "n9"]) == ["n2", "n3"]
    assert SlurmCluster(Client(states=None)).failed_nodes(["n2"]) == []


def test_a_failed_node_that_cannot_be_noted_is_told(tmp_path: Path) -> None:
    directory = TrialDirectory(tmp_path / "exp" / "trial")
    directory.create()
    told: list[str] = []
    note_failed_node(directory, "n2", lambda event, **fields: told.append(event))
    assert directory.failed_nodes() == ["n2"]
    (directory.control_path / "failed-nodes" / "n3").symlink_to("nowhere/n3")
    note_failed_node(directory, "n3", lambda event, **fields: told.append(event))
    assert told == ["node_failed", "failed_node_not_noted", "node_failed"]
