"""Workers as steps of SLURM allocations: one srun per worker, in the job and on the node that the layout says.

    SrunRunner.start --Popen--> srun --jobid=7 --het-group=1 --exact ... --job-name=rollout_worker-3 --slurmd--> worker
    signal --StepSignals--> one squeue -s, one scancel --> steps
                 +--no answer--> SIGTERM to each srun, which ends its step at once
    exit_kind <-- an exit that is srun's own, not the worker's, and what SLURM then says about the job
              <-- SIGTERM, which only SLURM sends by itself: a worker that listens stays

Nothing of the batch step's own SLURM_* reaches an srun: it may belong to another job than the one that the step goes
to.

A worker as a step of an allocation: the environment of a batch step in, the command line of srun out. Pure.

SLURM_JOB_ID, SLURM_HET_SIZE, ... --own_job--> OwnJob
worker, its command, where it runs --srun_command--> srun --jobid=7 --exact ... --job-name=rollout_worker-3 ...

Each step names its CPUs, memory and GPUs: a step that leaves one out takes all of it, and the next step then waits
silently, which among workers that wait for each other is a deadlock.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

from corral.experiments.trial.tether import die_with_parent
from corral.launcher.layout.layout import PlacedTrial, RunningAllocation, RunningAllocations, Step
from corral.launcher.runners.guard import guarded
from corral.launcher.runners.runner import (
    AllocationLostError,
    ContainedCommand,
    NodesNotAvailableError,
    contain,
    start_process,
)
from corral.launcher.slurm.client import SlurmClient, SlurmError, SlurmUnreachableError, clean_environment, patiently
from corral.launcher.slurm.verdict import JobPhase, phase_of
from corral.launcher.trial.ends import ExitKind
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE
from corral.scheduling.worker_information import parse_worker_id

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
class StepSlot:
    """A step of the layout, and what is around it where it runs now."""

    step: Step
    running: RunningAllocation
    node_gpus: int = 0
    """GPUs that the allocation has on the node."""
    sliced_cpus: int = 0
    """CPUs of all workers on the node whose GPUs are cut out of the node's."""

    @property
    def host(self) -> str:
        return self.running.hosts[self.step.node_index]


def step_name(worker: str) -> str:
    """Name of a worker's step in squeue: rollout_worker/3 is rollout_worker-3."""
    return worker.replace("/", "-")


def srun_command(worker: str, contained: ContainedCommand, slot: StepSlot, *, counts_gpus: bool = True) -> list[str]:
    """The srun that carries one worker.

    Args:
        counts_gpus: whether SLURM gives out GPUs here; else a node comes with all of them.
    """
    step, running = slot.step, slot.running
    is_sliced = step.gpus > 0 and step.gpu_binding == "slice" and counts_gpus
    gpu_options, prefix = _gpu_part(step, slot.node_gpus, counts_gpus=counts_gpus)
    return [
        "srun",
        f"--jobid={running.job_id}",
        *([] if running.het_group is None else [f"--het-group={running.het_group}"]),
        f"--job-name={step_name(worker)}",
        "--exact",
        *(["--overlap"] if is_sliced else []),
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={slot.host}",
        # Overlapping steps get the same cores, as SLURM counts theirs as free: each asks for all that they have.
        f"--cpus-per-task={slot.sliced_cpus if is_sliced else step.cpus}",
        *([f"--mem={step.mem_mb}M"] if step.mem_mb else []),
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


T = TypeVar("T")

_CLEAN_UP_TIMEOUT_S = 15.0
EXIT_OF_SRUN = 250
"""What srun ends with if it is SLURM that failed, by SLURM_EXIT_ERROR; SLURM's own 253 means out of memory."""
_SILENCE_S = 30.0


class StepSignals:
    """What the sruns of a trial ask SLURM. A controller that does not answer is not waited for once per worker."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._silent_until = float("-inf")

    def send(self, tasks: Collection["SrunTask"], signal_name: str) -> bool:
        """Sends a signal to the steps of tasks; False if SLURM does not do it."""
        try:
            found = self._ask(partial(self._client.steps, *sorted({task.job_id for task in tasks})))
            if steps := [step for task in tasks for step in found.get(task.name, ())]:
                self._ask(partial(self._client.cancel_steps, steps, signal_name=signal_name))
        except SlurmError:
            return False
        return True

    def why_not_started(self, job_id: str) -> ExitKind:
        """The cause of a step that could not be made."""
        try:
            job = self._ask(partial(self._client.job, job_id))
        except SlurmUnreachableError:
            return ExitKind.SLURM_AWAY
        except SlurmError:
            return ExitKind.OWN
        phase = phase_of(job.get("JobState", "")) if job is not None else JobPhase.ENDED
        return ExitKind.OWN if phase in (JobPhase.RUNNING, JobPhase.LEAVING) else ExitKind.JOB_GONE

    def _ask(self, question: Callable[[], T]) -> T:
        """SLURM's answer; SlurmUnreachableError at once for a while after it gave none."""
        if time.monotonic() < self._silent_until:
            raise SlurmUnreachableError("SLURM did not answer a moment ago")
        try:
            return question()
        except SlurmUnreachableError:
            self._silent_until = time.monotonic() + _SILENCE_S
            raise


@dataclass(slots=True, eq=False)
class SrunTask:
    """One step, seen through its srun."""

    process: subprocess.Popen[bytes]
    _: KW_ONLY
    name: str
    node: str
    signals: StepSignals
    job_id: str
    _is_ended_by_us: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        code = self.process.poll()
        # srun reports a task killed by signal n as 128 + n; elsewhere in the supervisor that is -n.
        return 128 - code if code is not None and 128 < code <= 128 + 64 else code

    def exit_kind(self) -> ExitKind:
        if self.process.poll() == EXIT_OF_SRUN:
            return self.signals.why_not_started(self.job_id)
        is_noticed = self.poll() == -signal.SIGTERM and not self._is_ended_by_us
        return ExitKind.NOTICED if is_noticed else ExitKind.OWN

    def end_srun(self) -> None:
        """SIGTERM to srun itself, which ends its step without time to finish."""
        if self.poll() is None:
            self._is_ended_by_us = True
            self.process.send_signal(signal.SIGTERM)


def _number_of(name: str) -> str:
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def _own_address_towards(name: str) -> str:
    """The address from which this machine reaches another one, to which nothing is sent; loopback if it does not."""
    try:
        address = _number_of(name)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((address, 9))
            return str(way.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def signal_tasks(tasks: Collection[SrunTask], signals: StepSignals, *, kill: bool) -> None:
    """Asks steps to end, or ends them. Through SLURM: a signal to srun itself would kill the worker at once."""
    running = [task for task in tasks if task.poll() is None]
    if not running:
        return
    # SIGINT: SIGTERM is what SLURM sends by itself when the job is about to end, and no order to leave.
    is_signalled = signals.send(running, "KILL" if kill else "INT")
    if not is_signalled or kill:  # SIGKILL of srun alone could leave the worker running
        for task in running:
            task.end_srun()


@dataclass(slots=True, kw_only=True)
class SrunRunner:
    """Starts workers as steps of the trial's allocations."""

    client: SlurmClient
    trial: PlacedTrial
    allocations: Callable[[], RunningAllocations]
    """The allocations that run at the moment; asked at each start."""
    why_away: Callable[[int], str] = lambda allocation: "its job does not run"
    """The job of an allocation that does not run, and its reason, for an error's text."""
    _signals: StepSignals = field(init=False)
    _address_by_host: dict[str, str] = field(default_factory=dict)
    _tasks: dict[str, SrunTask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._signals = StepSignals(self.client)

    def start(self, worker: str, command: Sequence[str], *, environment: Mapping[str, str], log_path: Path) -> SrunTask:
        slot = self.slot_of(worker)
        if worker in self._tasks:
            self._check_component(worker, slot.running)
        contained = self._contain(worker, command, environment)
        counts_gpus = self.trial.plan.cluster.gpu_request != "none"
        process = start_process(
            srun_command(worker, contained, slot, counts_gpus=counts_gpus),
            environment={**clean_environment(), **contained.environment, "SLURM_EXIT_ERROR": str(EXIT_OF_SRUN)},
            log_path=log_path,
            preexec_fn=die_with_parent(signal.SIGTERM),  # SIGKILL of srun could leave its step running
        )
        self._tasks[worker] = SrunTask(
            process,
            name=step_name(worker),
            node=slot.host,
            signals=self._signals,
            job_id=slot.running.steps_job_id,
        )
        return self._tasks[worker]

    def signal(self, workers: Collection[str], *, kill: bool) -> None:
        signal_tasks([self._tasks[worker] for worker in workers], self._signals, kill=kill)

    def slot_of(self, worker: str) -> StepSlot:
        """Where a worker would run now.

        Raises:
            NodesNotAvailableError: if its nodes are not there at the moment.
        """
        step = self.trial.layout.steps[worker]
        allocation = self.trial.layout.allocations[step.allocation]
        running = self.allocations().get(step.allocation)
        if running is None:
            why = self.why_away(step.allocation)
            raise NodesNotAvailableError(f"{worker} runs in allocation {allocation.name}, and {why}")
        if step.node_index >= len(running.hosts):
            raise NodesNotAvailableError(
                f"{worker} runs on node {step.node_index} of allocation {allocation.name}, and job {running.job_id} "
                f"has {len(running.hosts)} nodes"
            )
        sliced = [
            other.cpus
            for other in self.trial.layout.steps.values()
            if (other.allocation, other.node_index, other.gpu_binding) == (step.allocation, step.node_index, "slice")
        ]
        return StepSlot(
            step=step,
            running=running,
            node_gpus=allocation.gpus_per_node,
            sliced_cpus=sum(sliced),
        )

    def bind_address(self, worker: str) -> str:
        asked = self.trial.plan.cluster.bind_address
        return asked if asked != "auto" else self.address_of(self.slot_of(worker).host)

    def address_of(self, host: str) -> str:
        if host not in self._address_by_host:
            self._address_by_host[host] = self._look_up(host)
        return self._address_by_host[host]

    def _look_up(self, host: str) -> str:
        """A node's address, as number; where its name is loopback's to itself, the one that others reach it by."""
        name = self.client.node_address(host)
        found = _number_of(name)
        if not ip_address(found).is_loopback or found == name:  # a numeric address is meant as it stands
            return found
        others = {one for running in self.allocations().values() for one in running.hosts} - {host}
        ways = (_own_address_towards(self.client.node_address(other)) for other in sorted(others))
        return next((way for way in ways if not ip_address(way).is_loopback), found)

    def wait_for_cluster(self, host: str) -> None:
        patiently(lambda: self.address_of(host), f"the address of node {host}")

    def clean_up(self) -> None:
        jobs = sorted({running.steps_job_id for running in self.allocations().values()})
        end = partial(self.client.end_steps, *jobs, timeout_s=_CLEAN_UP_TIMEOUT_S)
        if steps := patiently(end, "the end of what an earlier supervisor has left"):
            raise TimeoutError(
                f"steps {steps} of an earlier supervisor did not end within {_CLEAN_UP_TIMEOUT_S:.0f} s of scancel"
            )

    def _check_component(self, worker: str, running: RunningAllocation) -> None:
        """Before a restart: a component of a heterogeneous job can be cancelled alone, and then stays away."""
        if not running.own_job_id or running.own_job_id == running.job_id:
            return
        try:
            leader, own = self.client.job(running.job_id), self.client.job(running.own_job_id)
        except SlurmError:
            return  # the next restart asks again
        if leader is None or own is None or phase_of(leader.get("JobState", "")) is not JobPhase.RUNNING:
            return  # all of it ends, and the supervisor learns why
        if phase_of(own.get("JobState", "")) is not JobPhase.RUNNING:
            raise AllocationLostError(
                f"{worker} runs in component {running.het_group} of job {running.job_id}, which is "
                f"{own.get('JobState')}; a component that has ended does not come back"
            )

    def _contain(self, worker: str, command: Sequence[str], environment: Mapping[str, str]) -> ContainedCommand:
        (kind, index), plan = parse_worker_id(worker), self.trial.plan
        own = {name: os.environ[name] for name in (TRIAL_UUID_VARIABLE,) if name in os.environ}
        return contain(
            guarded(command),
            {**environment, **own},
            scheduling=plan.scheduling[kind].scheduling_of(index),
            cluster=plan.cluster,
            directory=self.trial.directory.path,
        )
