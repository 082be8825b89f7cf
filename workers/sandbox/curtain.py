"""Curtain: a process sees all that its user sees, but for some folders, and for all processes that it did not start.

    worker, which holds the keys ──► bwrap ──► user code      the host's files and network, /dev
                                       │                      the hidden folders are empty
                                       └── ends with worker   /proc has its own processes alone: no memory, no files of
                                                              the worker, nobody to send a signal to

It keeps what a trial's user wrote from a trial's keys. It is no sandbox for what nobody trusts: what runs in one sees
nothing of the host (`bubblewrap.py`), and none can be made behind a curtain, where the kernel mounts no other /proc.
Who starts it makes it the leader of a process group, and ends the group: until bwrap has tied its processes to each
other, all of them are in it. Of a starter that is killed in just that moment, what is left goes with its worker's guard
(`launcher/runners/guard.py`), as all that a worker has started.

As root, user code keeps root's rights, by which it can draw the curtain aside.
"""

import logging
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_SIGNALLED = 128  # above it, bwrap says by which signal what it ran was ended


@dataclass(frozen=True, slots=True)
class Curtain:
    """Hides some folders; nothing at all if there are none.

    Example:
        curtain = draw_curtain([trial.secrets_path])
        subprocess.Popen(curtain.around(["python", "their_code.py"]))
    """

    program: str
    hidden: tuple[Path, ...]

    def around(self, command: Sequence[str]) -> list[str]:
        """The command line by which this runs behind it."""
        if not self.hidden:
            return list(command)
        over = [word for folder in self.hidden for word in ("--tmpfs", str(folder))]
        return [
            *(self.program, "--dev-bind", "/", "/", *over),
            *("--unshare-pid", "--proc", "/proc", "--die-with-parent", "--", *command),
        ]

    def exit_code(self, code: int) -> int:
        """Of what ran behind it, with the number of a signal below 0, from what bwrap ended with."""
        return _SIGNALLED - code if self.hidden and code > _SIGNALLED else code


def draw_curtain(hidden: Sequence[Path]) -> Curtain:
    """One that hides these folders, tried out; where this machine cannot, the log says why, and nothing is hidden."""
    if not hidden:
        return Curtain("", ())
    curtain = Curtain(shutil.which("bwrap") or "", tuple(hidden))
    reason = "there is no bwrap in the PATH; install the package bubblewrap" if not curtain.program else _try(curtain)
    if not reason:
        return curtain
    names = ", ".join(map(str, hidden))
    logger.warning("rewards and agents could read %s, if they looked for it: nothing hides it here: %s", names, reason)
    return Curtain("", ())


def _try(curtain: Curtain) -> str:
    """Why it cannot be drawn; "" if it can."""
    try:
        tried = subprocess.run(curtain.around(["true"]), capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if tried.returncode == 0 else tried.stderr.strip() or f"bwrap ended with {tried.returncode}"
