"""Layout: which allocations a trial asks SLURM for, and in which of them, on which node, each worker's step runs.

    groups + node shapes --plan_layout (pure, at submission)--> Layout --layout.json--> supervisor
                                                                 +--> options of sbatch
                                                                 +--> options of srun, per worker

The head allocation holds the batch step, and in it the supervisor, Redis, the master and the manager. `rl-submit` asks
for the head (with its components); the supervisor asks for the extra jobs, of groups and elastic workers, so that none
waits for a trial that never started.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from corral.experiments.trial.directory import TrialDirectory
from corral.scheduling.slurm_formats import COUNTED_MEMORY, MemoryRules
from corral.scheduling.worker_information import LayoutKind, WorkerKind, parse_worker_id

if TYPE_CHECKING:  # rl-status reads layouts, and needs no schema of plans
    from corral.experiments.plan import RunPlan

AllocationRole = Literal["head", "component", "group", "elastic"]
GpuBinding = Literal["per_task", "slice", "none"]


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """One job, or one component of a heterogeneous job: nodes that are alike."""

    name: str
    """`head`, the worker kind of a component or group, or the id of an elastic worker."""
    role: AllocationRole
    num_nodes: int
    cpus_per_node: int
    """Largest sum of a node's steps, and the supervisor's core on the head; more where the memory takes more CPUs."""
    mem_mb_per_node: int
    """0 where the site does not count memory."""
    gpus_per_node: int
    gpu_type: str | None = None
    options: dict[str, str] = {}
    """Scheduling fields that are set for the whole allocation, by their field name (`partition`, `time_limit`, ...)."""
    extra_arguments: tuple[str, ...] = ()
    """Further options of sbatch, checked."""
    memory: MemoryRules = COUNTED_MEMORY

    @property
    def is_extra_job(self) -> bool:
        """Whether it is a job of its own, which the supervisor asks for."""
        return self.role in ("group", "elastic")

    @property
    def size(self) -> int:
        """The largest job is asked for first: it is the hardest to get."""
        return self.num_nodes * (self.cpus_per_node + 100 * self.gpus_per_node)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker runs and what its step asks for."""

    allocation: int
    """Index into `Layout.allocations`."""
    node_index: int
    """Node of the allocation; names are known only once SLURM has started it."""
    cpus: int
    mem_mb: int
    """0 where the site does not count memory."""
    gpus: int = 0
    gpu_indices: tuple[int, ...] = ()
    """The worker's GPUs among those that the allocation has on its node. Exact with `slice`; with `per_task` SLURM
    gives the first ones that are free, so workers that ask for equally many may have swapped theirs."""
    gpu_binding: GpuBinding = "per_task"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of it, as layout.json keeps it."""

    kind: LayoutKind
    reason: str
    """Why this layout, for people."""
    allocations: tuple[Allocation, ...]
    """The head first."""
    steps: dict[str, Step]
    """By worker, `kind/index`."""

    @property
    def fixed(self) -> list[int]:
        """Indices of the allocations that the trial cannot do without: all but those of elastic workers."""
        return [index for index, allocation in enumerate(self.allocations) if allocation.role != "elastic"]

    @property
    def components(self) -> list[int]:
        """Indices of the allocations of the job that a submission asks for: the head, and what starts with it."""
        return [index for index, one in enumerate(self.allocations) if one.role in ("head", "component")]

    @property
    def head(self) -> Allocation:
        """The allocation that the supervisor runs in."""
        return self.allocations[0]

    def workers_of(self, allocation: int) -> list[str]:
        """The workers whose steps run in one allocation."""
        return [worker for worker, step in self.steps.items() if step.allocation == allocation]

    def kinds_of(self, allocation: int) -> list[WorkerKind]:
        """The kinds of these workers."""
        return list(dict.fromkeys(parse_worker_id(worker)[0] for worker in self.workers_of(allocation)))

    def to_json(self) -> bytes:
        """The text of layout.json."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes) -> "Layout":
        """Read layout.json.

        Raises:
            ValueError: if it is not a layout.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"layout.json does not hold a layout ({error}); submit the trial again") from error


class RunningAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation that SLURM has given: how srun names it, and its nodes in the order of their indices."""

    job_id: str
    """Job id; of a heterogeneous job the leader's."""
    het_group: int | None
    """Component of a heterogeneous job."""
    hosts: tuple[str, ...]
    own_job_id: str = ""
    """Where squeue shows its steps: a component of a heterogeneous job has an id of its own; "" is `job_id`."""

    @property
    def steps_job_id(self) -> str:
        """The job that squeue shows its steps under."""
        return self.own_job_id or self.job_id


RunningAllocations = Mapping[int, RunningAllocation]
"""By index into `Layout.allocations`; what does not run is not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTrial:
    """A trial whose workers all have their places on a cluster."""

    plan: "RunPlan"
    layout: Layout
    directory: TrialDirectory
