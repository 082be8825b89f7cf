"""What a commit asked for is written by a thread of its own, while this rank goes on with other requests.

    main thread   SaveCheckpoint ──► copies in host memory ──begin──► "copied"    TrainStep, Inference, ... at once
                                                              │
    this thread                                               └──► write, hash, fsync ──► WrittenReply ──► look again
    I/O thread    Written ──► deferred ─────────────────────────────────────────────────────────────────┴──► reply

Guarantee: what is written is not changed by any later call, since it is a copy; that it counts only when it is whole is
the commit's doing, which names no file that was not reported here.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from corral.workers.backends.files.share import WeightShare
from corral.workers.backends.train_state import StateShard
from corral.workers.requests.messages import SaveCheckpoint, WrittenReply
from corral.workers.streams.closing import Closing


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSave:
    """What a commit has of a role, as far as this rank writes it."""

    state: StateShard
    weights: WeightShare | None
    """None where the commit takes those that were published."""

    def copied(self) -> "RoleSave":
        """The same in host memory; a collective."""
        return RoleSave(state=self.state.copied(), weights=self.weights and self.weights.copied())

    def write(self, request: SaveCheckpoint, *, on_progress: Callable[[], None]) -> WrittenReply:
        """Write it into the directories that the request names."""
        return WrittenReply(
            weights={} if self.weights is None else self.weights.write(Path(request.weights), on_progress=on_progress),
            state=self.state.write(Path(request.state), on_progress=on_progress),
        )


class Write(Protocol):
    """Writes files."""

    def __call__(self, *, on_progress: Callable[[], None]) -> WrittenReply:
        """What it has written, which is on disk; `on_progress` is called every few megabytes, and may raise."""


class _GivenUpError(Exception):
    """Nobody wants what is being written any more."""


class SavesBehind(Closing):
    """One thread that writes what roles of this rank have copied, in the order in which they did.

    Example:
        saves.begin("actor", partial(save.copied().write, request))
        saves.written("actor")      # None until all of it is on disk
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saves")
        self._by_role: dict[str, Future[WrittenReply]] = {}
        self._given_up = threading.Event()
        self._on_written: Callable[[], None] = lambda: None

    def announce_to(self, on_written: Callable[[], None]) -> None:
        """Call this, in any thread, whenever a role's files are there or will not be."""
        self._on_written = on_written

    def begin(self, role: str, write: Write) -> None:
        """Write a role's files; what it wrote before is forgotten."""
        given_up = self._given_up

        def on_progress() -> None:
            if given_up.is_set():
                raise _GivenUpError

        self._by_role[role] = self._executor.submit(_outcome, write, on_progress)
        self._by_role[role].add_done_callback(lambda _: self._on_written())

    def written(self, role: str) -> WrittenReply | None:
        """What `begin` was last given for this role, once it has ended; None before.

        Raises: what the writing raised, except an error of the file system, which the reply tells.
        """
        future = self._by_role[role]
        return future.result() if future.done() else None

    def write_now(self, role: str, write: Write, *, on_progress: Callable[[], None]) -> None:
        """Write a role's files in this thread, before anything else."""
        future: Future[WrittenReply] = Future()
        future.set_result(_outcome(write, on_progress))
        self._by_role[role] = future

    def forget(self) -> None:
        """An epoch is over, or the worker leaves: nobody reads what is being written, and its memory is wanted back.

        It waits for a write(2) or an fsync that is under way; the deadline is that of the caller's phase.
        """
        self._given_up.set()
        for future in self._by_role.values():
            future.cancel()
        wait(self._by_role.values())
        self._by_role.clear()
        self._given_up = threading.Event()

    def close(self) -> None:
        self.forget()
        self._executor.shutdown()


def _outcome(write: Write, on_progress: Callable[[], None]) -> WrittenReply:
    try:
        return write(on_progress=on_progress)
    except OSError as error:
        # A full disk ends this save and not the rank, whose weights are ahead of every commit.
        return WrittenReply(state={}, weights={}, failed_because=f"{type(error).__name__}: {error}")
