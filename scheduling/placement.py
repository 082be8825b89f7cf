"""Worker groups and the shape of a node -> which task runs on which node, with which GPUs.

    1. node 0      master_worker and gserver_manager: every other worker talks to them
    2. GPU tasks   first fit decreasing by GPUs per task, so that the fewest nodes are opened; all GPUs of a task are of
                   one node, so a server of several never straddles two
    3. CPU tasks   beside them: model workers together, generation servers and rollout workers in turns over the nodes

Nodes and GPUs are indices: their names are known only once SLURM has started the allocation. Where the supervisor and
Redis run too, one core and 1 GiB of every node stay free for them.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from corral.scheduling.scheduling import GIB_MB, ExperimentScheduling, Scheduling, TasksGroup
from corral.scheduling.slurm_formats import COUNTED_MEMORY, MemoryRules
from corral.scheduling.worker_information import WorkerKind, parse_worker_id, worker_id

SLACK_CPUS = 1
SLACK_MEM_MB = GIB_MB

Groups = ExperimentScheduling | Mapping[WorkerKind, TasksGroup]
"""All groups of a trial, or those that share an allocation."""


Resource = Literal["cpu", "gpu", "mem"]
"""A field of Scheduling that says how much a task takes of a node."""
Amounts = Mapping[Resource, int]
_UNITS: Mapping[Resource, str] = {"gpu": "GPUs", "cpu": "CPUs", "mem": "MB"}
_ON_FIRST_NODE = ("master_worker", "gserver_manager")


class PlacementError(ValueError):
    """Tasks that the nodes cannot hold.

    kind: the group that found no place.
    resource: what it lacks.
    """

    def __init__(self, message: str, *, kind: WorkerKind, resource: Resource) -> None:
        super().__init__(message)
        self.kind = kind
        self.resource = resource


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """The resources of one node of the partition for jobs; all nodes of an allocation are alike."""

    cpus: int
    gpus: int
    mem_mb: int
    threads_per_core: int = 1
    """How many of the CPUs are one core: SLURM gives a step whole cores, whatever part of one it asks for."""
    memory: MemoryRules = COUNTED_MEMORY
    rules: str = ""
    """Why jobs get less than the node has, for people."""

    def __post_init__(self) -> None:
        if self.cpus < 1 or self.gpus < 0 or self.mem_mb < 1 or self.threads_per_core < 1:
            raise ValueError(f"a node needs at least 1 cpu, 0 gpus, 1 MB and 1 thread per core, got {self}")

    @property
    def amounts(self) -> Amounts:
        """All that jobs get."""
        per_cpu = self.memory.max_mb_per_cpu
        mem_mb = self.mem_mb if per_cpu is None else min(self.mem_mb, self.cpus * per_cpu)
        return {"cpu": self.cpus, "mem": mem_mb, "gpu": self.gpus}

    def whole_cores(self, cpus: int) -> int:
        """CPUs of the cores that a step which asks for so many has to itself."""
        return -(-cpus // self.threads_per_core) * self.threads_per_core


class TaskSlot(NamedTuple):
    """Where one task runs."""

    node: int
    gpus: tuple[int, ...]
    """GPU indices among its node's; empty for CPU tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where every worker of a trial runs."""

    slots: Mapping[str, TaskSlot]
    """By worker id, in the order of the groups and their indices."""
    num_nodes: int


def place(scheduling: Groups, node: NodeShape, *, has_slack: bool = True, max_nodes: int | None = None) -> Placement:
    """Place every fixed task on the fewest nodes that first fit decreasing finds.

    Args:
        scheduling: the groups.
        node: shape of every node.
        has_slack: whether the supervisor runs here too.
        max_nodes: nodes that there are; None for as many as it takes.

    Raises:
        PlacementError: naming the group, what it asks for, and what a node or the nodes have.
    """
    slack: Amounts = {"cpu": node.whole_cores(SLACK_CPUS), "mem": SLACK_MEM_MB} if has_slack else {}
    wanted = {kind: _wanted(group.scheduling, node) for kind, group in scheduling.items()}
    for kind, group in scheduling.items():
        _check_fits_a_node(kind, group.scheduling, wanted[kind], node, slack)
    tasks = [(kind, index) for kind, group in scheduling.items() for index in range(group.count)]
    nodes = _Nodes({name: has - slack.get(name, 0) for name, has in node.amounts.items()}, max_nodes=max_nodes)

    def turn(task: tuple[WorkerKind, int]) -> tuple[int, int]:
        """Those with most GPUs first, of these those with most memory; of those without, training ranks first."""
        gpus, mem_mb = wanted[task[0]]["gpu"], wanted[task[0]]["mem"]
        return -gpus, -mem_mb if gpus else int(task[0] != "model_worker")

    for kind, index in tasks:
        if kind in _ON_FIRST_NODE:
            nodes.put_on_first(kind, index, wanted[kind])
    # Python's sort is stable: equal tasks keep the order of their groups and indices.
    for kind, index in sorted((task for task in tasks if task[0] not in _ON_FIRST_NODE), key=turn):
        in_turns = not wanted[kind]["gpu"] and kind != "model_worker"
        nodes.put(kind, index, wanted[kind], in_turns=in_turns)
    slots = {worker_id(*task): nodes.slots[worker_id(*task)] for task in tasks}
    return Placement(slots=slots, num_nodes=nodes.num_nodes)


def most_tasks_that_fit(
    groups: Groups, kinds: Sequence[WorkerKind], node: NodeShape, *, has_slack: bool = True, max_nodes: int | None
) -> int:
    """The most tasks, fewer than now, that each group of these kinds, which are equally many, may have; 0 if not one.

    Args:
        groups: all that are placed together.
    """

    def is_too_many(count: int) -> bool:
        fewer = {kind: groups[kind].model_copy(update={"count": count}) for kind in kinds}
        try:
            place({**dict(groups.items()), **fewer}, node, has_slack=has_slack, max_nodes=max_nodes)
        except ValueError:
            return True
        return False

    return bisect.bisect_left(range(1, groups[kinds[0]].count), True, key=is_too_many)


def _wanted(task: Scheduling, node: NodeShape) -> Amounts:
    """The resources that a task takes of a node, its CPUs in whole cores."""
    return {"cpu": node.whole_cores(task.cpu), "mem": task.mem, "gpu": task.gpu}


def _check_fits_a_node(kind: WorkerKind, task: Scheduling, wanted: Amounts, node: NodeShape, slack: Amounts) -> None:
    for name, unit in _UNITS.items():
        free, has = slack.get(name, 0), node.amounts[name]
        if wanted[name] <= has - free:
            continue
        in_cores = f" ({node.threads_per_core} are a core, and a step has whole ones)"
        whole = in_cores if name == "cpu" and wanted[name] > task.cpu else ""
        of_which = f", of which {free} {'stays' if free == 1 else 'stay'} free for the supervisor" if free else ""
        remedy = _most_gpus(kind, node) if name == "gpu" else f"; lower {kind}'s {name}"
        message = f"{kind} wants {wanted[name]} {unit} in one task{whole}; a node has {has}{of_which}{remedy}"
        raise PlacementError(message, kind=kind, resource=name)


def _most_gpus(kind: WorkerKind, node: NodeShape) -> str:
    """The nearest number that fits."""
    if node.gpus == 0:
        return ""
    if kind == "generation_server":
        return f", and a server's GPUs are of one node; lower t in the allocation to at most {node.gpus}"
    return f"; lower {kind}'s gpu to at most {node.gpus}"


class _Nodes:
    """The free resources of the nodes opened so far, and the slot of each task."""

    def __init__(self, empty: Amounts, *, max_nodes: int | None) -> None:
        self._empty = empty
        self._max_nodes = max_nodes
        self._rooms = [dict(empty)]
        self._next_in_turn = 0
        self.slots: dict[str, TaskSlot] = {}

    @property
    def num_nodes(self) -> int:
        return len(self._rooms)

    def put_on_first(self, kind: WorkerKind, index: int, wanted: Amounts) -> None:
        if lacking := _lacking(self._rooms[0], wanted):
            beside = sorted({parse_worker_id(worker)[0] for worker in self.slots})
            raise PlacementError(
                f"{kind} must run on node 0 and wants {_words(wanted)}; there are {_words(self._rooms[0])} left on it "
                f"beside {', '.join(beside)}; lower their cpu or mem",
                kind=kind,
                resource=lacking,
            )
        self._put(0, worker_id(kind, index), wanted)

    def put(self, kind: WorkerKind, index: int, wanted: Amounts, *, in_turns: bool) -> None:
        """On the first node that has room, or on the next one in turn."""
        first = self._next_in_turn if in_turns else 0
        numbers = [*range(first, self.num_nodes), *range(first)]
        number = next((number for number in numbers if not _lacking(self._rooms[number], wanted)), self.num_nodes)
        if number == self.num_nodes:
            self._open(kind, index, wanted)
        self._put(number, worker_id(kind, index), wanted)
        if in_turns:
            self._next_in_turn = (number + 1) % self.num_nodes

    def _open(self, kind: WorkerKind, index: int, wanted: Amounts) -> None:
        if self._max_nodes is not None and self.num_nodes >= self._max_nodes:
            left = "; ".join(f"node {number}: {_words(room)}" for number, room in enumerate(self._rooms[:4]))
            raise PlacementError(
                f"{worker_id(kind, index)} wants {_words(wanted)}, and the {self.num_nodes} nodes that there are have "
                f"no room left for it ({left}{'; ...' if self.num_nodes > 4 else ''}); "
                f"lower the groups' counts or sizes, or allow more nodes",
                kind=kind,
                resource=_lacking(self._rooms[-1], wanted) or "cpu",
            )
        self._rooms.append(dict(self._empty))

    def _put(self, number: int, worker: str, wanted: Amounts) -> None:
        room = self._rooms[number]
        first_gpu = self._empty["gpu"] - room["gpu"]
        self.slots[worker] = TaskSlot(number, tuple(range(first_gpu, first_gpu + wanted["gpu"])))
        for name, amount in wanted.items():
            room[name] -= amount


def _lacking(room: Amounts, wanted: Amounts) -> Resource | None:
    """The first thing that there is too little of; None if there is room."""
    return next((name for name, amount in wanted.items() if amount > room[name]), None)


def _words(amounts: Amounts) -> str:
    return f"{amounts['cpu']} CPUs, {amounts['gpu']} GPUs and {amounts['mem']} MB"
