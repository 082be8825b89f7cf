"""Worker groups and the shape of a node -> which task runs on which node, with which GPUs.

    1. node 0      master_worker and gserver_manager: every other worker talks to them
    2. GPU tasks   first fit decreasing by GPUs per task, so that the fewest nodes are opened; all GPUs of a task are of
                   one node, so a server of several never straddles two
    3. CPU tasks   beside them: model workers together, generation servers and rollout workers in turns over the nodes

Nodes and GPUs are indices: their names are known only once SLURM has started the allocation. Where the supervisor and
Redis run too, one core and 1 GiB of every node stay free for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from corral.scheduling.scheduling import GIB_MB, ExperimentScheduling, Scheduling, TasksGroup
from corral.scheduling.worker_information import WorkerKind, worker_id

SLACK_CPUS = 1
SLACK_MEM_MB = GIB_MB

Groups = ExperimentScheduling | Mapping[WorkerKind, TasksGroup]
"""All groups of a trial, or those that share an allocation."""


Resource = Literal["cpu", "gpu", "mem"]
"""A field of Scheduling that says how much a task takes of a node."""


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
    """What one node of the partition has; all nodes of an allocation are alike."""

    cpus: int
    gpus: int
    mem_mb: int
    threads_per_core: int = 1
    """How many of the CPUs are one core: SLURM gives a step whole cores, whatever part of one it asks for."""

    def __post_init__(self) -> None:
        if self.cpus < 1 or self.gpus < 0 or self.mem_mb < 1 or self.threads_per_core < 1:
            raise ValueError(f"a node needs at least 1 cpu, 0 gpus, 1 MB and 1 thread per core, got {self}")

    def whole_cores(self, cpus: int) -> int:
        """CPUs of the cores that a step which asks for so many has to itself."""
        return -(-cpus // self.threads_per_core) * self.threads_per_core


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlacement:
    """Where the tasks of one restart unit run. The tasks of a unit start, and are started again, together."""

    unit: str
    """"model_worker" for all model workers (their collectives live and die together), otherwise a worker id."""
    kind: WorkerKind
    first_index: int
    """Worker index of the unit's first task; the others follow."""
    nodes: tuple[int, ...]
    """Node index of each task."""
    gpus: tuple[tuple[int, ...], ...]
    """GPU indices of each task among its node's; empty for CPU tasks."""

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where every worker of a trial runs."""

    units: tuple[UnitPlacement, ...]
    num_nodes: int


def place(
    scheduling: Groups,
    node: NodeShape,
    *,
    has_slack: bool = True,
    max_nodes: int | None = None,
    tasks_together: Mapping[WorkerKind, int] | None = None,
) -> Placement:
    """Place every fixed task on the fewest nodes that first fit decreasing finds.

    Args:
        scheduling: the groups.
        node: shape of every node.
        has_slack: whether the supervisor runs here too.
        max_nodes: nodes that there are; None for as many as it takes.
        tasks_together: by kind, how many consecutive tasks must share a node (tensor-parallel ranks); 1 if not given.

    Raises:
        PlacementError: naming the group, what it asks for, and what a node or the nodes have.
        ValueError: if tasks cannot be split as `tasks_together` says.
    """
    slack = (node.whole_cores(SLACK_CPUS), SLACK_MEM_MB) if has_slack else (0, 0)
    blocks = _blocks(scheduling, node, slack, tasks_together or {})
    nodes = _Nodes(node, slack=slack, max_nodes=max_nodes)
    on_first_node = [block for block in blocks if block.kind in ("master_worker", "gserver_manager")]
    with_gpus = [block for block in blocks if block.gpus > 0 and block not in on_first_node]
    others = [block for block in blocks if block.gpus == 0 and block not in on_first_node]
    for block in on_first_node:
        nodes.put_on_first(block)
    # Python's sort is stable: equal blocks keep the order of their groups and indices.
    for block in sorted(with_gpus, key=lambda block: (-block.gpus, -block.mem_mb)):
        nodes.put_first_fit(block)
    for block in sorted(others, key=lambda block: block.kind != "model_worker"):
        if block.kind == "model_worker":
            nodes.put_first_fit(block)
        else:
            nodes.put_round_robin(block)
    return Placement(units=_units(scheduling, nodes.tasks), num_nodes=nodes.num_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Consecutive tasks of one group that must share a node."""

    kind: WorkerKind
    indices: range
    task: Scheduling
    cpus_per_task: int
    """CPUs of whole cores."""

    @property
    def cpus(self) -> int:
        return len(self.indices) * self.cpus_per_task

    @property
    def gpus(self) -> int:
        return len(self.indices) * self.task.gpu

    @property
    def mem_mb(self) -> int:
        return len(self.indices) * self.task.mem


def _blocks(
    scheduling: Groups, node: NodeShape, slack: tuple[int, int], tasks_together: Mapping[WorkerKind, int]
) -> list[_Block]:
    blocks = []
    for kind, group in scheduling.items():
        size = tasks_together.get(kind, 1)
        if size < 1 or group.count % size:
            raise ValueError(f"{kind}: {group.count} tasks cannot be split into blocks of {size} that share a node")
        _check_fits_a_node(kind, group.scheduling, size, node, slack)
        for first in range(0, group.count, size):
            indices = range(first, first + size)
            cpus = node.whole_cores(group.scheduling.cpu)
            blocks.append(_Block(kind=kind, indices=indices, task=group.scheduling, cpus_per_task=cpus))
    return blocks


def _check_fits_a_node(kind: WorkerKind, task: Scheduling, size: int, node: NodeShape, slack: tuple[int, int]) -> None:
    tasks = "one task" if size == 1 else f"{size} tasks that share a node"
    slack_cpus, slack_mem_mb = slack
    if size * task.gpu > node.gpus:
        message = f"{kind} wants {size * task.gpu} GPUs in {tasks}; a node has {node.gpus}"
        message += _most_gpus(kind, node) if size == 1 else ""
        raise PlacementError(message, kind=kind, resource="gpu")
    cpus = size * node.whole_cores(task.cpu)
    if cpus > node.cpus - slack_cpus:
        stays = "stays" if slack_cpus == 1 else "stay"
        of_which = f", of which {slack_cpus} {stays} free for the supervisor" if slack_cpus else ""
        in_cores = f" ({node.threads_per_core} are a core, and a step has whole ones)" if cpus > size * task.cpu else ""
        raise PlacementError(
            f"{kind} wants {cpus} CPUs in {tasks}{in_cores}; a node has {node.cpus}{of_which}; lower {kind}'s cpu",
            kind=kind,
            resource="cpu",
        )
    if size * task.mem > node.mem_mb - slack_mem_mb:
        of_which = f", of which {slack_mem_mb} stay free for the supervisor" if slack_mem_mb else ""
        raise PlacementError(
            f"{kind} wants {size * task.mem} MB in {tasks}; a node has {node.mem_mb}{of_which}; lower {kind}'s mem",
            kind=kind,
            resource="mem",
        )


def _most_gpus(kind: WorkerKind, node: NodeShape) -> str:
    """The nearest number that fits."""
    if node.gpus == 0:
        return ""
    if kind == "generation_server":
        return f", and a server's GPUs are of one node; lower t in the allocation to at most {node.gpus}"
    return f"; lower {kind}'s gpu to at most {node.gpus}"


@dataclass(slots=True, kw_only=True)
class _Room:
    """What is left on one node."""

    cpus: int
    mem_mb: int
    gpus: list[int] = field(default_factory=list)
    """Free GPU indices, ascending."""

    def lacks(self, block: _Block) -> Resource | None:
        """The first thing that the block needs more of than there is; None if there is room."""
        if block.cpus > self.cpus:
            return "cpu"
        if block.mem_mb > self.mem_mb:
            return "mem"
        return "gpu" if block.gpus > len(self.gpus) else None


class _Nodes:
    """The nodes opened so far, and where each task went."""

    def __init__(self, shape: NodeShape, *, slack: tuple[int, int], max_nodes: int | None) -> None:
        if max_nodes is not None and max_nodes < 1:
            raise ValueError(f"max_nodes must be at least 1, got {max_nodes}")
        self._shape = shape
        self._slack_cpus, self._slack_mem_mb = slack
        self._max_nodes = max_nodes
        self._rooms = [self._empty()]
        self._next_in_turn = 0
        self.tasks: dict[tuple[WorkerKind, int], tuple[int, tuple[int, ...]]] = {}
        """Node index and GPU indices by kind and worker index."""

    @property
    def num_nodes(self) -> int:
        return len(self._rooms)

    def put_on_first(self, block: _Block) -> None:
        if lacking := self._rooms[0].lacks(block):
            raise PlacementError(
                f"{block.kind} must run on node 0 and wants {_amount(block)}; there are {self._left(0)} left on it "
                f"beside {', '.join(sorted({kind for kind, _ in self.tasks}))}; lower their cpu or mem",
                kind=block.kind,
                resource=lacking,
            )
        self._put(0, block)

    def put_first_fit(self, block: _Block) -> None:
        self._put(self._first_with_room(range(len(self._rooms)), block), block)

    def put_round_robin(self, block: _Block) -> None:
        turns = [(self._next_in_turn + step) % len(self._rooms) for step in range(len(self._rooms))]
        number = self._first_with_room(turns, block)
        self._put(number, block)
        self._next_in_turn = (number + 1) % len(self._rooms)

    def _first_with_room(self, numbers: Sequence[int], block: _Block) -> int:
        for number in numbers:
            if self._rooms[number].lacks(block) is None:
                return number
        if self._max_nodes is not None and len(self._rooms) >= self._max_nodes:
            left = "; ".join(f"node {number}: {self._left(number)}" for number in range(min(len(self._rooms), 4)))
            raise PlacementError(
                f"{worker_id(block.kind, block.indices[0])} wants {_amount(block)}, and the {len(self._rooms)} nodes "
                f"that there are have no room left for it ({left}{'; ...' if len(self._rooms) > 4 else ''}); "
                f"lower the groups' counts or sizes, or allow more nodes",
                kind=block.kind,
                resource=self._rooms[-1].lacks(block) or "cpu",
            )
        self._rooms.append(self._empty())
        return len(self._rooms) - 1

    def _empty(self) -> _Room:
        shape = self._shape
        return _Room(
            cpus=shape.cpus - self._slack_cpus,
            mem_mb=shape.mem_mb - self._slack_mem_mb,
            gpus=list(range(shape.gpus)),
        )

    def _put(self, number: int, block: _Block) -> None:
        room = self._rooms[number]
        room.cpus -= block.cpus
        room.mem_mb -= block.mem_mb
        for index in block.indices:
            gpus, room.gpus = tuple(room.gpus[: block.task.gpu]), room.gpus[block.task.gpu :]
            self.tasks[block.kind, index] = (number, gpus)

    def _left(self, number: int) -> str:
        room = self._rooms[number]
        return f"{room.cpus} CPUs, {len(room.gpus)} GPUs and {room.mem_mb} MB"


def _amount(block: _Block) -> str:
    return f"{block.cpus} CPUs, {block.gpus} GPUs and {block.mem_mb} MB"


def _units(
    scheduling: Groups, tasks: Mapping[tuple[WorkerKind, int], tuple[int, tuple[int, ...]]]
) -> tuple[UnitPlacement, ...]:
    units = []
    for kind, group in scheduling.items():
        is_one_unit = kind == "model_worker"
        for first in range(0, group.count, group.count if is_one_unit else 1):
            indices = range(first, group.count if is_one_unit else first + 1)
            units.append(
                UnitPlacement(
                    unit=kind if is_one_unit else worker_id(kind, first),
                    kind=kind,
                    first_index=first,
                    nodes=tuple(tasks[kind, index][0] for index in indices),
                    gpus=tuple(tasks[kind, index][1] for index in indices),
                )
            )
    return tuple(units)
