"""Workers as steps of SLURM allocations: one srun per worker, in the job and on the node that the layout says.

    SrunRunner.start --Popen--> srun --jobid=7 --het-group=1 --exact ... --job-name=rollout_worker-3 --slurmd--> worker

Each step names its CPUs, memory and GPUs: a step that leaves one out takes all of it, and the next step then waits
silently, which among workers that wait for each other is a deadlock. Nothing of the batch step's own SLURM_* reaches an
srun: it may belong to another job than the one that the step goes to.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.layout.layout import Layout, RunningAllocation, RunningAllocations, Step
from corral.launcher.runners.containers import ContainedCommand, contain
from corral.launcher.runners.runner import AllocationLostError, PlaceNotAvailableError, TaskSpec
from corral.launcher.runners.srun_task import EXIT_OF_SRUN, SrunTask, StepSignals, signal_tasks
from corral.launcher.slurm.client import SlurmClient, SlurmError, clean_environment
from corral.launcher.slurm.patience import patiently
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE
from corral.launcher.trial.tether import die_with_parent
from corral.scheduling.slurm_formats import expand_host_list
from corral.scheduling.worker_information import parse_worker_id

_CLEAN_UP_TIMEOUT_S = 15.0

# Cuts a worker's devices out of the list that its step has: the step's GPUs need not start at 0.
_CUT_GPUS = """\
wanted=$1 missing=$2 number=0 cut= inherited=$CUDA_VISIBLE_DEVICES
shift 2
rest=$inherited,
while [ -n "$rest" ] && [ "$rest" != , ]; do
  device=${rest%%,*} rest=${rest#*,}
  case ,$wanted, in *,$number,*) cut=${cut:+$cut,}$device missing=$((missing - 1)) ;; esac
  number=$((number + 1))
done
if [ "$missing" -ne 0 ]; then
  echo "GPUs $wanted were planned for this worker, but its step has CUDA_VISIBLE_DEVICES=$inherited" >&2
  exit 1
fi
export CUDA_VISIBLE_DEVICES="$cut"
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """A step of the layout, and what is around it where it runs now."""

    step: Step
    running: RunningAllocation
    node_gpus: int = 0
    """GPUs that the allocation has on the node."""
    sliced_cpus: int = 0
    """CPUs of all workers on the node whose GPUs are cut out of the node's."""
    overlaps: bool = False
    """Whether it runs beside the plan, on resources that are other steps'."""

    @property
    def host(self) -> str:
        return self.running.hosts[self.step.node_index]


def batch_allocations(environment: Mapping[str, str]) -> dict[int, RunningAllocation]:
    """The head, and the components of its heterogeneous job, as the batch step's environment names them."""
    job_id = environment["SLURM_JOB_ID"]
    size = int(environment.get("SLURM_HET_SIZE", "0"))
    if size == 0:
        hosts = tuple(expand_host_list(environment["SLURM_JOB_NODELIST"]))
        return {0: RunningAllocation(job_id=job_id, het_group=None, hosts=hosts)}
    return {
        group: RunningAllocation(
            job_id=environment["SLURM_JOB_ID_HET_GROUP_0"],
            het_group=group,
            hosts=tuple(expand_host_list(environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"])),
            own_job_id=environment[f"SLURM_JOB_ID_HET_GROUP_{group}"],
        )
        for group in range(size)
    }


def step_name(worker: str) -> str:
    """Name of a worker's step in squeue: rollout_worker/3 is rollout_worker-3."""
    return worker.replace("/", "-")


def srun_command(worker: str, contained: ContainedCommand, place: StepPlace, *, counts_gpus: bool = True) -> list[str]:
    """The srun that carries one worker.

    Args:
        worker: its id.
        contained: its command.
        place: where it runs.
        counts_gpus: whether SLURM gives out GPUs here; else a node comes with all of them.
    """
    step, running = place.step, place.running
    is_sliced = step.gpus > 0 and step.gpu_binding == "slice" and counts_gpus
    gpu_options, prefix = _gpu_part(step, place.node_gpus, counts_gpus=counts_gpus)
    return [
        "srun",
        f"--jobid={running.job_id}",
        *([] if running.het_group is None else [f"--het-group={running.het_group}"]),
        f"--job-name={step_name(worker)}",
        "--exact",
        *(["--overlap"] if is_sliced or place.overlaps else []),
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={place.host}",
        # Overlapping steps get the same cores, as SLURM counts theirs as free: each asks for all that they have.
        f"--cpus-per-task={place.sliced_cpus if is_sliced else step.cpus}",
        f"--mem={step.mem_mb}M",
        *gpu_options,
        "--kill-on-bad-exit=1",
        "--unbuffered",
        "--input=none",
        *contained.srun_options,
        # No --output, in which srun expands patterns: what it inherits is the worker's log already.
        *prefix,
        *contained.command,
    ]


def _gpu_part(step: Step, node_gpus: int, *, counts_gpus: bool) -> tuple[list[str], list[str]]:
    """Options of srun, and what goes before the command inside the step."""
    planned = ",".join(map(str, step.gpu_indices))
    if not counts_gpus:
        return [], ["env", f"CUDA_VISIBLE_DEVICES={planned}"]
    if not step.gpus:
        # Without device cgroups a step without GRES sees every GPU of the node. SLURM takes the variable away on its
        # way to the step, so it is set inside.
        return ["--gres=none"], ["env", "CUDA_VISIBLE_DEVICES="]
    match step.gpu_binding:
        case "slice":
            return [f"--gres=gpu:{node_gpus}"], ["sh", "-c", _CUT_GPUS, "cut-gpus", planned, str(step.gpus)]
        case "none":
            return [f"--gres=gpu:{step.gpus}"], []
        case "per_task":
            return [f"--gpus-per-task={step.gpus}"], []


class SrunRunner:
    """Starts workers as steps of the trial's allocations."""

    def __init__(
        self,
        *,
        client: SlurmClient,
        plan: RunPlan,
        layout: Layout,
        directory: TrialDirectory,
        allocations: Callable[[], RunningAllocations],
        why_away: Callable[[int], str] = lambda allocation: "its job does not run",
    ) -> None:
        """
        Args:
            client: SLURM's commands.
            plan: the trial.
            layout: where each worker runs.
            directory: the trial's folder.
            allocations: what runs at the moment; asked at each start.
            why_away: the job of an allocation that does not run, and its reason, for an error's text.
        """
        self._client = client
        self._signals = StepSignals(client)
        self._plan = plan
        self._layout = layout
        self._directory = directory
        self._allocations = allocations
        self._why_away = why_away
        self._moved: dict[str, tuple[Step, bool]] = {}
        self._address_by_host: dict[str, str] = {}
        self._tasks: dict[str, SrunTask] = {}

    def start(self, spec: TaskSpec) -> SrunTask:
        place = self.place_of(spec.worker)
        if spec.worker in self._tasks:
            self._check_component(spec.worker, place.running)
        contained = self._contain(spec)
        counts_gpus = self._plan.cluster.gpu_request != "none"
        command = srun_command(spec.worker, contained, place, counts_gpus=counts_gpus)
        with spec.log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**clean_environment(), **contained.environment, "SLURM_EXIT_ERROR": str(EXIT_OF_SRUN)},
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),  # SIGKILL of srun could leave its step running
            )
        self._tasks[spec.worker] = SrunTask(
            process,
            name=step_name(spec.worker),
            node=place.host,
            signals=self._signals,
            job_id=place.running.steps_job_id,
        )
        return self._tasks[spec.worker]

    def signal(self, workers: Collection[str], *, kill: bool) -> None:
        signal_tasks([self._tasks[worker] for worker in workers], self._signals, kill=kill)

    def place_of(self, worker: str) -> StepPlace:
        """Where a worker would run now.

        Raises:
            PlaceNotAvailableError: if its nodes are not there at the moment.
        """
        step, overlaps = self._moved.get(worker, (self._layout.steps[worker], False))
        allocation = self._layout.allocations[step.allocation]
        running = self._allocations().get(step.allocation)
        if running is None:
            why = self._why_away(step.allocation)
            raise PlaceNotAvailableError(f"{worker} runs in allocation {allocation.name}, and {why}")
        if step.node_index >= len(running.hosts):
            raise PlaceNotAvailableError(
                f"{worker} runs on node {step.node_index} of allocation {allocation.name}, and job {running.job_id} "
                f"has {len(running.hosts)} nodes"
            )
        moved = {other: elsewhere for other, (elsewhere, _) in self._moved.items()}
        sliced = [
            other.cpus
            for other in {**self._layout.steps, **moved}.values()
            if (other.allocation, other.node_index, other.gpu_binding) == (step.allocation, step.node_index, "slice")
        ]
        return StepPlace(
            step=step,
            running=running,
            node_gpus=allocation.gpus_per_node,
            sliced_cpus=sum(sliced),
            overlaps=overlaps,
        )

    def move(self, worker: str, step: Step, *, overlaps: bool = False) -> None:
        """Lets a worker run elsewhere from its next start on; with `overlaps` on what other steps have."""
        self._moved[worker] = (step, overlaps)

    def move_back(self, worker: str) -> None:
        """Lets a worker run where the layout says, from its next start on."""
        self._moved.pop(worker, None)

    def bind_address(self, worker: str) -> str:
        if self._plan.cluster.bind_address != "auto":
            return self._plan.cluster.bind_address
        return self.address_of(self.place_of(worker).host)

    def address_of(self, host: str) -> str:
        """A node's own address, as the cluster knows it."""
        if host not in self._address_by_host:
            name = self._client.node_address(host)
            self._address_by_host[host] = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0].__str__()
        return self._address_by_host[host]

    def wait_for_slurm(self, host: str) -> None:
        """Waits until the controller answers, which it need not when a job starts; without it there are no steps.

        Raises:
            SlurmUnreachableError: if it does not answer in a long time.
        """
        patiently(lambda: self.address_of(host), f"the address of node {host}")

    def clean_up(self) -> None:
        jobs = sorted({running.steps_job_id for running in self._allocations().values()})
        deadline = time.monotonic() + _CLEAN_UP_TIMEOUT_S
        while steps := patiently(lambda: self._steps_of(jobs), "what an earlier supervisor has left"):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"steps {steps} of an earlier supervisor did not end within {_CLEAN_UP_TIMEOUT_S:.0f} s of scancel"
                )
            patiently(partial(self._client.cancel_steps, steps, signal_name="KILL"), f"the end of steps {steps}")
            time.sleep(0.2)

    def _steps_of(self, jobs: Sequence[str]) -> list[str]:
        return [step for ids in self._client.steps(*jobs).values() for step in ids]

    def _check_component(self, worker: str, running: RunningAllocation) -> None:
        """Before a restart: a component of a heterogeneous job can be cancelled alone, and then stays away."""
        if not running.own_job_id or running.own_job_id == running.job_id:
            return
        try:
            leader, own = self._client.job(running.job_id), self._client.job(running.own_job_id)
        except SlurmError:
            return  # the next restart asks again
        if leader is None or own is None or leader.get("JobState") != "RUNNING":
            return  # all of it ends, and the supervisor is told why
        if own.get("JobState") not in ("RUNNING", "SUSPENDED"):
            raise AllocationLostError(
                f"{worker} runs in component {running.het_group} of job {running.job_id}, which is "
                f"{own.get('JobState')}; a component that has ended does not come back"
            )

    def _contain(self, spec: TaskSpec) -> ContainedCommand:
        kind, index = parse_worker_id(spec.worker)
        environment = dict(spec.environment)
        if TRIAL_UUID_VARIABLE in os.environ:
            environment[TRIAL_UUID_VARIABLE] = os.environ[TRIAL_UUID_VARIABLE]
        return contain(
            spec.command,
            environment,
            scheduling=self._plan.scheduling[kind].scheduling_of(index),
            cluster=self._plan.cluster,
            directory=self._directory.path,
        )
