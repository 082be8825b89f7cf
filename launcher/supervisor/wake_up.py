"""What a loop sleeps on: signals, and ends of children.

SIGTERM, SIGINT, SIGUSR2 --noted--+
SIGCHLD --------------------------+--a byte--> pipe --> wait returns
"""

import os
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

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
        """One that was taken is for whoever takes the next."""
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
