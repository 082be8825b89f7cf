"""What a supervisor tells its keeper: that it lives, by a byte in a pipe every second as long as its loop goes round;
and, by its exit code, whether another one is to follow.

supervisor --thread, while the loop has gone round lately--> pipe --> keeper: silent for too long --SIGKILL--> another
           --ENDED, FAILED, ABANDONED--> the keeper ends too       --any other code, or a signal: it broke--> another

A supervisor that is stopped writes nothing; nor does one whose loop hangs, though its threads run.
"""

import contextlib
import os
import select
import threading
import time
from enum import IntEnum

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
