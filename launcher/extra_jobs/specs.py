"""What runs in the extra jobs: from the layout to the jobs, and where their workers run meanwhile."""

from collections.abc import Callable, Collection

from corral.launcher.extra_jobs.actions import ExtraJobSpec
from corral.launcher.layout.layout import Layout, RunningAllocations, Step
from corral.launcher.runners.runner import MovingRunner, Task, TaskSpec

EXTRA_JOB_ROLES = ("group", "elastic")


class FallbackRunner:
    """Runs elastic workers that have a fallback in the supervisor's own job while their own is away."""

    def __init__(self, runner: MovingRunner, layout: Layout, allocations: Callable[[], RunningAllocations]) -> None:
        self._runner = runner
        self._allocations = allocations
        self._fallback_by_worker = fallback_steps(layout)
        self._allocation_by_worker = {worker: layout.steps[worker].allocation for worker in self._fallback_by_worker}

    def start(self, spec: TaskSpec) -> Task:
        self._aim(spec.worker)
        return self._runner.start(spec)

    def bind_address(self, worker: str) -> str:
        self._aim(worker)
        return self._runner.bind_address(worker)

    def signal(self, workers: Collection[str], *, kill: bool) -> None:
        self._runner.signal(workers, kill=kill)

    def clean_up(self) -> None:
        self._runner.clean_up()

    def _aim(self, worker: str) -> None:
        fallback = self._fallback_by_worker.get(worker)
        if fallback is None:
            return
        if self._allocation_by_worker[worker] in self._allocations():
            self._runner.move_back(worker)
        else:
            # It was not planned for, so it shares: rollout workers wait for servers most of their time.
            self._runner.move(worker, fallback, overlaps=True)


def extra_job_specs(layout: Layout) -> list[ExtraJobSpec]:
    """The jobs that the supervisor asks for."""
    return [
        ExtraJobSpec(
            name=allocation.name,
            num_nodes=allocation.num_nodes,
            size=allocation.num_nodes * (allocation.cpus_per_node + 100 * allocation.gpus_per_node),
            is_required=allocation.role == "group",
        )
        for allocation in layout.allocations
        if allocation.role in EXTRA_JOB_ROLES
    ]


def fallback_steps(layout: Layout) -> dict[str, Step]:
    """Where elastic workers without GPUs run while their own job is away: on the supervisor's node."""
    mem_mb = layout.head.mem_mb_per_node
    return {
        worker: Step(allocation=0, node_index=0, cpus=1, mem_mb=min(step.mem_mb, mem_mb), gpu_binding="none")
        for worker, step in layout.steps.items()
        if layout.allocations[step.allocation].role == "elastic" and worker.startswith("rollout_worker/")
    }
