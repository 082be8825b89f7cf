"""How a worker's task is started: the border between the supervisor and local processes or SLURM steps.

A worker's command inside its group's container: its prefix, the options of srun, the variables that go along.

    container_runtime: apptainer     srun ... apptainer exec [--nv] --bind ... IMAGE python3 -m corral.workers ...
                       singularity   the same by its older name
                       pyxis         srun --container-image=IMAGE --container-mounts=... python3 -m corral.workers ...

The trial directory is mounted where it is on the host: plan, trial log, checkpoints and rendezvous lie in it. Weights
and data are the user's to mount. Supervisor, Redis and srun stay outside: containers rarely hold SLURM's commands.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from corral.experiments.config.cluster import ClusterConfig
from corral.experiments.errors import ConfigError
from corral.experiments.trial.tether import die_with_parent
from corral.launcher.runners.guard import END_ALL, guarded
from corral.launcher.trial.ends import ExitKind
from corral.launcher.trial.processes import kill_session
from corral.scheduling.scheduling import Scheduling
from corral.scheduling.worker_information import worker_id

if TYPE_CHECKING:
    from corral.experiments.plan import RunPlan


class NodesNotAvailableError(OSError):
    """The nodes that a worker has to run on are not there at the moment: their job waits, or has ended."""


class AllocationLostError(NodesNotAvailableError):
    """A part of the trial's own job has ended, and nothing gives it back to this attempt."""


class Task(Protocol):
    """A started worker process."""

    @property
    def pid(self) -> int:
        """Process id on the supervisor's host (of srun, where a step carries the worker)."""

    @property
    def node(self) -> str:
        """Host that the worker runs on."""

    def poll(self) -> int | None:
        """Return code once it ended (negative: a signal), else None."""

    def exit_kind(self) -> ExitKind:
        """Why it ended; asked once, when it has."""


class TaskRunner(Protocol):
    """Starts tasks."""

    def start(self, worker: str, command: Sequence[str], *, environment: Mapping[str, str], log_path: Path) -> Task:
        """Start one worker process.

        Args:
            worker: kind/index.
            environment: is added to the supervisor's own.
            log_path: standard output and error are appended here.

        Raises:
            NodesNotAvailableError: if its nodes are not there at the moment.
            OSError: if the command cannot be started.
        """

    def signal(self, workers: Collection[str], *, kill: bool) -> None:
        """Ask the last started tasks of these workers to end, all at once, or end them and what they started."""

    def bind_address(self, worker: str) -> str:
        """The interface that the worker's servers listen on.

        Raises:
            NodesNotAvailableError: if its nodes are not there at the moment.
        """

    def clean_up(self) -> None:
        """End what an earlier supervisor of this attempt left running."""


def start_process(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log_path: Path,
    preexec_fn: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, which reads nothing and appends all that it prints to the log.

    Without `preexec_fn` it outlives this process and its terminal, whose end sends it no SIGHUP.
    """
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=preexec_fn,
        )


PROGRAM_RUNTIMES = ("apptainer", "singularity")
"""Runtimes that are a program on the node, called by this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainedCommand:
    """A command and its surroundings, as srun has to start it."""

    srun_options: tuple[str, ...] = ()
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables of srun's own environment."""


def contain(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    scheduling: Scheduling,
    cluster: ClusterConfig,
    directory: Path,
) -> ContainedCommand:
    """The command as it runs for this group: as it is, or inside the group's image.

    Args:
        command: an interpreter of the host and its arguments; a container has an interpreter of its own.

    Raises:
        ConfigError: if there is an image, and the trial's folder cannot be mounted in it.
    """
    image = scheduling.container_image
    if image is None:
        return ContainedCommand(command=tuple(command), environment=environment)
    inside = (cluster.container_python, *command[1:])
    mounts = (_own_mount(directory), *scheduling.container_mounts)
    if (program := cluster.container_runtime) == "pyxis":
        options = [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"]
        if environment:
            # Otherwise the image's own value would win.
            options.append(f"--container-env={','.join(environment)}")
        return ContainedCommand(srun_options=tuple(options), command=inside, environment=environment)
    assert program is not None, "experiments/problems.py refuses an image that nothing could run"
    gpus = ["--nv"] if scheduling.gpu else []
    # Variables by their own variables: --env splits its argument at commas.
    carried = {f"{program.upper()}ENV_{name}": value for name, value in environment.items()}
    return ContainedCommand(
        command=(program, "exec", *gpus, *(f"--bind={mount}" for mount in mounts), image, *inside),
        environment={**environment, **carried},
    )


def _own_mount(directory: Path) -> str:
    path = str(directory)
    if any(character in path for character in ",:"):
        raise ConfigError.of(
            f"the trial directory {path} cannot be mounted in a container: its path holds a comma or a colon",
            hint="choose another name or cluster.fileroot",
            path=("cluster", "fileroot"),
            shown=path,
        )
    return f"{path}:{path}"


_GPUS = Path("/proc/driver/nvidia/gpus")
_HIDDEN_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of containers, of Windows' subsystem, of AMD


class LocalTask:
    """One worker under its guard, which leads a session of its own."""

    node = "localhost"

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        if self._process.returncode is not None:
            return self._process.returncode
        # Look before reaping: while the leader is a zombie its id cannot be used again, so the session is still ours.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_session(self.pid)  # empty, unless the guard itself was killed
        return self._process.wait()

    def exit_kind(self) -> ExitKind:
        return ExitKind.OWN

    def end(self, *, kill: bool) -> None:
        if self.poll() is not None:
            return
        if kill:
            os.kill(self.pid, END_ALL)
            os.kill(self.pid, signal.SIGCONT)  # it hears that even if it is stopped
        else:
            self._process.terminate()


class LocalRunner:
    """Starts workers on this machine; groups that ask for GPUs get their share of the visible ones."""

    def __init__(self, *, bind_address: str, gpus_by_worker: Mapping[str, Sequence[str]]) -> None:
        self._bind_address = "127.0.0.1" if bind_address == "auto" else bind_address
        self._gpus_by_worker = gpus_by_worker
        self._tasks: dict[str, LocalTask] = {}

    def start(
        self, worker: str, command: Sequence[str], *, environment: Mapping[str, str], log_path: Path
    ) -> LocalTask:
        whole_environment = os.environ | {
            "OMP_NUM_THREADS": "1",  # a laptop's few cores are shared by all workers
            # Empty, not unset: a worker without GPUs must not find the ones of its neighbours.
            "CUDA_VISIBLE_DEVICES": ",".join(self._gpus_by_worker.get(worker, ())),
            **environment,
        }
        process = start_process(
            guarded(command),
            environment=whole_environment,
            log_path=log_path,
            # What is committed is whole; an orphan would train on, unsupervised.
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        self._tasks[worker] = LocalTask(process)
        return self._tasks[worker]

    def signal(self, workers: Collection[str], *, kill: bool) -> None:
        for worker in workers:
            self._tasks[worker].end(kill=kill)

    def bind_address(self, worker: str) -> str:
        return self._bind_address

    def clean_up(self) -> None:
        """Nothing: the supervisor itself ends the processes of this machine."""


def visible_gpus() -> list[str]:
    """The GPUs that this machine offers: those of CUDA_VISIBLE_DEVICES that the driver shows, else all of them."""
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = [str(index) for index in range(len(os.listdir(_GPUS)))] if _GPUS.is_dir() else []
    if inherited is None:
        return present
    named = [device.strip() for device in inherited.split(",") if device.strip()]
    if not _GPUS.is_dir() and any(map(os.path.exists, _HIDDEN_DRIVERS)):
        return named
    return [device for device in named if device in present or (present and not device.isdigit())]


def wanted_gpus(plan: "RunPlan") -> dict[str, int]:
    """How many GPUs each worker of a trial asks for."""
    ids = ((worker.kind, worker.index) for worker in plan.workers)
    return {worker_id(kind, index): plan.scheduling[kind].scheduling_of(index).gpu for kind, index in ids}


def share_gpus(gpus_wanted: Mapping[str, int], gpus: Sequence[str]) -> dict[str, list[str]]:
    """Deals GPUs to workers in order.

    Raises:
        ValueError: if there are too few, with both numbers.
    """
    total = sum(gpus_wanted.values())
    if total > len(gpus):
        groups = sorted({worker.partition("/")[0] for worker, count in gpus_wanted.items() if count})
        raise ValueError(
            f"the trial needs {total} GPUs ({', '.join(groups)}) but this machine has {len(gpus)}; lower the counts in "
            "`allocation`, set `gpu: 0` in these groups' scheduling to train on the CPU, or submit to SLURM"
        )
    remaining = iter(gpus)
    return {worker: [next(remaining) for _ in range(count)] for worker, count in gpus_wanted.items()}
