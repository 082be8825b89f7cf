"""Nodes that fail: which are down, what moves where if the allocation outlives them, and what has to be given up.

Layout.steps, lost nodes --relocate (pure)--> moves: worker -> Step on a node that is left
                                         +--> without_room: workers that fit nowhere
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from corral.launcher.cluster.errors import answer_or
from corral.launcher.layout.layout import Layout, RunningAllocation, Step
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.slurm.srun import SrunRunner
from corral.scheduling.worker_information import WorkerKind, parse_worker_id

_SERVE_TOGETHER: tuple[WorkerKind, ...] = ("generation_server", "rollout_worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """What becomes of the workers of lost nodes."""

    moves: Mapping[str, Step] = field(default_factory=dict)
    """New step by worker, on resources that nobody else has."""
    without_room: tuple[str, ...] = ()
    why_over: str = ""
    """Why the attempt cannot go on; "" if it can."""


def relocate(layout: Layout, steps: Mapping[str, Step], lost: Collection[int]) -> Relocation:
    """Finds room for the workers of lost nodes on the nodes that are left of the head's allocation. Pure.

    Args:
        steps: where each worker runs at present.
        lost: all nodes of the head that have failed so far, by their indices.

    Returns:
        Moves that leave every node within what the allocation has there.
    """
    steps = {worker: step for worker, step in steps.items() if step.allocation == 0}
    left = [node for node in range(layout.head.num_nodes) if node not in lost]
    staying = {worker: step for worker, step in steps.items() if step.node_index in left}
    homeless = [worker for worker in steps if worker not in staying]
    moves: dict[str, Step] = {}
    kept = {kind_of(worker) for worker in staying}
    # First those that nobody stands in for, then the largest: the small ones fit into what is left.
    for worker in sorted(
        homeless, key=lambda worker: (kind_of(worker) in kept, -steps[worker].gpus, -steps[worker].cpus, worker)
    ):
        taken = {**staying, **moves}
        places = (_fit(layout, taken, steps[worker], node) for node in left)
        if (found := next((place for place in places if place is not None), None)) is not None:
            moves[worker] = found
    return Relocation(moves=moves, without_room=tuple(worker for worker in homeless if worker not in moves))


def kind_of(worker: str) -> WorkerKind:
    return parse_worker_id(worker)[0]


def _steps_on(steps: Mapping[str, Step], node: int) -> list[Step]:
    """Those on a node of the head."""
    return [step for step in steps.values() if (step.allocation, step.node_index) == (0, node)]


def _fit(layout: Layout, taken: Mapping[str, Step], step: Step, node: int) -> Step | None:
    head, others = layout.head, _steps_on(taken, node)
    reserved_cpus, reserved_mem_mb = _slack(layout) if node == 0 else (0, 0)
    free_gpus = sorted(set(range(head.gpus_per_node)) - {gpu for one in others for gpu in one.gpu_indices})
    fits = (
        sum(one.cpus for one in others) + step.cpus + reserved_cpus <= head.cpus_per_node
        and sum(one.mem_mb for one in others) + step.mem_mb + reserved_mem_mb <= head.mem_mb_per_node
        and len(free_gpus) >= step.gpus
    )
    if not fits:
        return None
    gpu_indices = tuple(free_gpus[: step.gpus])
    return msgspec.structs.replace(step, node_index=node, gpu_indices=gpu_indices)


def _slack(layout: Layout) -> tuple[int, int]:
    """What the supervisor needs of the head node: at most what the layout left free there."""
    head, own = layout.head, _steps_on(layout.steps, 0)
    cpus = head.cpus_per_node - sum(step.cpus for step in own)
    mem_mb = head.mem_mb_per_node - sum(step.mem_mb for step in own)
    return min(1, max(0, cpus)), min(256, max(0, mem_mb))


def why_over(steps: Mapping[str, Step], without_room: Collection[str]) -> str:
    """Why an attempt cannot go on after a loss, or "" if it can. Pure.

    A generation server or a rollout worker can be done without while there is another one.

    Args:
        steps: of the workers that it still has.
        without_room: those that it has just lost.
    """
    for worker in without_room:
        if (kind := kind_of(worker)) not in _SERVE_TOGETHER:
            return f"{worker} has no room on the nodes that are left"
        if not any(kind_of(other) == kind for other in steps):
            return f"no {kind} is left"
    return ""


class NodeLoss:
    """Keeps book of the lost nodes of an allocation that outlives them, and moves what ran there.

    Args:
        head: the supervisor's own job.
    """

    def __init__(self, *, cluster: SlurmQueue, layout: Layout, head: RunningAllocation, runner: SrunRunner) -> None:
        self._cluster = cluster
        self._layout = layout
        self._head = head
        self._runner = runner
        self._steps = dict(layout.steps)
        self._lost: set[int] = set()
        self._expected_ends: set[str] = set()

    def look(self) -> list[str]:
        """Nodes that the cluster has taken out of the job since the last look."""
        job = answer_or(None, self._cluster.job, self._head.job_id)
        if job is None or not job.hosts:
            return []  # the next exit asks again
        down = {index for index, host in enumerate(self._head.hosts) if host not in job.hosts}
        gone = sorted(down - self._lost)
        self._lost |= down
        return [self._head.hosts[index] for index in gone]

    def relocate(self) -> Relocation:
        """Lets the workers of the lost nodes run elsewhere from their next start on."""
        relocation = relocate(self._layout, self._steps, self._lost)
        for worker, step in relocation.moves.items():
            self._runner.move(worker, step)
        self._steps |= relocation.moves
        for worker in relocation.without_room:
            del self._steps[worker]
        self._expected_ends |= {*relocation.moves, *relocation.without_room}
        return replace(relocation, why_over=why_over(self._steps, relocation.without_room))

    def started(self, worker: str) -> None:
        """It runs on another node from here on: that its node left explains no end any more."""
        self._expected_ends.discard(worker)

    def explains_end(self, worker: str) -> bool:
        """Whether the exit of a worker, told once, is explained by the loss of its node."""
        is_expected = worker in self._expected_ends
        self._expected_ends.discard(worker)
        return is_expected

    def host_of(self, step: Step) -> str:
        """The node of a step."""
        return self._head.hosts[step.node_index]
