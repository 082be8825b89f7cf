"""An untrusted program in a sandbox: its limits, and the result of its run.

    upload ──► work directory ◄── exec ──► Result: exit code or signal, output, which limit ended it
                    └──► download              └── no sandbox, no result: SandboxError

What the program does wrong is in the result. That a sandbox cannot be made, or is gone, is an error, and says nothing
of the program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

WORK = "/sandbox"
"""The work directory, as what runs in a sandbox sees it: there it starts, and relative paths begin."""


class SandboxError(RuntimeError):
    """There is no sandbox, so nothing is known of what was to run in it."""


class SandboxFileError(OSError):
    """A file could not be put into a sandbox or taken out of it, as its disk is full, or it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may take. Its wall clock is bounded beside, by `timeout_s`."""

    cpu_s: int = 10
    """Of each process; all of them together have at most wall clock times CPUs."""
    memory_bytes: int = 2**30
    """Address space of each process, and what all of them hold together."""
    processes: int = 64
    """At a time, threads included."""
    open_files: int = 256
    """Of each process."""
    file_bytes: int = 2**26
    """Of each file."""
    output_bytes: int = 1_000_000
    """Of each of the two streams; the rest is read and dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended. When there is a result, no process of the run is left."""

    exit_code: int | None
    """None if a signal or a limit ended it. Above 128 a program may have said so itself, as shells do."""
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_dropped_bytes: int = 0
    """What came beyond `Limits.output_bytes`."""
    stderr_dropped_bytes: int = 0
    timed_out: bool = False
    """Whether it had used up its wall clock or its CPU time."""
    out_of_memory: bool = False
    """Whether its processes together held too much. One alone is refused memory, and ends as it likes."""
    too_many_processes: bool = False
    """Whether there were too many, on a kernel that does not refuse them."""

    @property
    def is_success(self) -> bool:
        """Whether it ended by itself, with 0."""
        return self.exit_code == 0


def needs_sandbox(function: FunctionT) -> FunctionT:
    """Marks a reward or an agent that runs in sandboxes: rl-submit and workers then see first whether there are any."""
    function.__dict__["needs_sandbox"] = True
    return function


def asks_for_sandbox(function: object) -> bool:
    """Whether a reward or an agent is marked so."""
    return getattr(function, "needs_sandbox", False) is True
