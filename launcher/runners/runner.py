"""How a worker's task is started: the border between the supervisor and local processes or SLURM steps."""

import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from corral.launcher.trial.ends import ExitKind


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
