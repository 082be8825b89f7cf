"""What a supervisor tells its keeper: that it lives, by a byte in a pipe every second as long as its loop goes round;
and, by its exit code, whether another one is to follow.

supervisor --thread, while the loop has gone round lately--> pipe --> keeper: silent for too long --SIGKILL--> another
           --ENDED, FAILED, ABANDONED--> the keeper ends too       --any other code, or a signal: it broke--> another

A supervisor that is stopped writes nothing; nor does one whose loop hangs, though its threads run.

What a loop sleeps on: signals, and ends of children.

SIGTERM, SIGINT, SIGUSR2 --noted--+
SIGCHLD --------------------------+--a byte--> pipe --> wait returns
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from types import FrameType

from corral.launcher.files.patience import PATIENCE_S

MARK_VARIABLE = "CORRAL_KEEPER_MARK"
MARK_INTERVAL_S = 1.0
_LOOP_S = 300.0  # the loop waits for commands of SLURM's, each with a deadline of its own
START_S = 2 * PATIENCE_S + 300.0
"""Until the loop begins: the address of its node and the end of earlier steps are waited for, each for PATIENCE_S."""
_SILENT_S = 20.0


class SupervisorExit(IntEnum):
    """Ends after which no other supervisor follows; no interpreter or library ends with these by itself."""

    ENDED = 90
    """The attempt has ended, which is recorded."""
    FAILED = 91
    """The same, and the trial has failed."""
    ABANDONED = 92
    """The attempt is not this supervisor's any more: a later one has begun, or its job has gone."""

    @property
    def of_keeper(self) -> int:
        """The exit code of the batch step, or of a local trial's process."""
        return 0 if self is SupervisorExit.ENDED else 1


EXIT_BROKEN = 70
"""Something that the supervisor could not answer; it is in its log."""


class ProgressMark:
    """The supervisor's end; does nothing where no keeper listens."""

    def __init__(self) -> None:
        self._descriptor = int(os.environ.pop(MARK_VARIABLE, "-1"))
        self._went_round = time.monotonic()

    def begin(self) -> None:
        """The loop begins: starts the thread that writes."""
        self.go_round()
        if self._descriptor >= 0:
            os.set_inheritable(self._descriptor, False)
            threading.Thread(target=self._write, name="mark", daemon=True).start()

    def go_round(self) -> None:
        """The loop is at its beginning."""
        self._went_round = time.monotonic()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the keeper has gone, and so shall we
            while True:
                if time.monotonic() - self._went_round < _LOOP_S:
                    os.write(self._descriptor, b".")
                time.sleep(MARK_INTERVAL_S)


class LifeWatch:
    """The keeper's end of the pipe.

    Of a gap between two looks no more counts than looks are apart: what suspends the keeper suspends both.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._silent_s, self._limit_s = 0.0, START_S
        self._looked_at = time.monotonic()

    def is_silent(self) -> bool:
        """Whether the supervisor has said nothing for too long; to be asked about once in an interval."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked_at, 2 * MARK_INTERVAL_S)
        self._looked_at = now
        if select.select([self._descriptor], [], [], 0.0)[0] and os.read(self._descriptor, 4096):
            self._silent_s, self._limit_s = 0.0, _SILENT_S
        return self._silent_s > self._limit_s

    def close(self) -> None:
        os.close(self._descriptor)


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class WakeUp:
    """A pipe to the loop; to be used by the main thread.

    Args:
        signals: came too early for the supervisor before this one.
    """

    def __init__(self, signals: Sequence[signal.Signals] = ()) -> None:
        self._signals = [*signals]
        self._read_end = -1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are noted, and wake the loop; SIGCHLD does no more than that."""
        self._read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous_descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        previous = {number: signal.signal(number, self._note) for number in _STOP_SIGNALS}
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may go
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_descriptor)
            os.close(self._read_end)
            os.close(write_end)

    def take_signals(self) -> list[signal.Signals]:
        """Those that came since the last call, in order."""
        taken, self._signals = self._signals, []  # one that comes in between is in one list or in the other
        return taken

    def put_back(self, number: signal.Signals) -> None:
        """Put a taken signal back, for the next caller of `take_signals`."""
        self._signals.append(number)

    def has_signals(self) -> bool:
        """Whether some wait to be taken."""
        return bool(self._signals)

    def wait(self, timeout_s: float) -> None:
        """Until something happens, or the time is over."""
        select.select([self._read_end], [], [], timeout_s)
        with suppress(BlockingIOError):  # once the pipe is empty: what woke the loop has happened, however often
            while os.read(self._read_end, 4096):
                continue

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))
