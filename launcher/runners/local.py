"""Workers as processes of this machine: supervisor --LocalRunner--> a guard per worker, in a session of its own."""

import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from corral.experiments.trial.tether import die_with_parent
from corral.launcher.runners.guard import END_ALL, guarded
from corral.launcher.runners.runner import start_process
from corral.launcher.trial.ends import ExitKind
from corral.launcher.trial.processes import kill_session
from corral.scheduling.worker_information import worker_id

if TYPE_CHECKING:
    from corral.experiments.plan import RunPlan


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
