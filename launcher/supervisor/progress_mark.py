"""The supervisor's sign of life to its keeper: a byte in a pipe every second, as long as its loop goes round.

supervisor --thread, while the loop has gone round lately--> pipe --> keeper: silent for too long --SIGKILL--> another

A supervisor that is stopped writes nothing; nor does one whose loop hangs, though its threads run.
"""

import contextlib
import os
import select
import subprocess
import threading
import time

MARK_VARIABLE = "CORRAL_KEEPER_MARK"
_INTERVAL_S = 1.0
_LOOP_S = 300.0  # the loop waits for commands of SLURM's, each with a deadline of its own
_START_S = 600.0
_SILENT_S = 20.0


class ProgressMark:
    """The supervisor's end; does nothing where no keeper listens."""

    def __init__(self) -> None:
        self._descriptor = int(os.environ.pop(MARK_VARIABLE, "-1"))
        self._went_round = time.monotonic()

    def begin(self) -> None:
        """Starts the thread that writes."""
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
                time.sleep(_INTERVAL_S)


def wait_while_it_lives(child: subprocess.Popen[bytes], descriptor: int) -> bool:
    """Waits for the end of a supervisor, and ends one that has fallen silent; returns whether that was so.

    Only seconds that this process was awake for are counted: a machine that was suspended has suspended both.
    """
    silent, limit = 0, _START_S
    while True:
        if select.select([descriptor], [], [], _INTERVAL_S)[0]:
            if not os.read(descriptor, 4096):
                child.wait()
                return False
            silent, limit = 0, _SILENT_S
            continue
        silent += 1
        if child.poll() is not None:
            return False
        if silent * _INTERVAL_S > limit:
            child.kill()
            child.wait()
            return True
