"""HiddenSecrets: a process sees all that its user sees, but for some folders, and for all processes that it did not
start.

    worker, which holds the keys ──► bwrap ──► user code      the host's files and network, /dev
                                       │                      the hidden folders are empty
                                       └── ends with worker   /proc has its own processes alone: no memory, no files of
                                                              the worker, nobody to send a signal to

It keeps what a trial's user wrote from a trial's keys. It is no sandbox for what nobody trusts: what runs in a sandbox
sees nothing of the host (`bubblewrap.py`). None can be made where secrets are hidden: the kernel mounts no other /proc
there. The caller makes the process the leader of a process group, and ends the group: until bwrap has tied its
processes to each other, all of them are in it. If the starter is killed in just that moment, the rest goes with its
worker's guard (`launcher/runners/guard.py`), as all that a worker has started.

As root, user code keeps root's rights, by which it can make the folders visible again.
"""

import logging
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_SIGNALLED = 128  # above it, bwrap says by which signal what it ran was ended


@dataclass(frozen=True, slots=True)
class HiddenSecrets:
    """Hides some folders; nothing at all if there are none.

    Example:
        secrets = hide_secrets(trial.secrets_path)
        subprocess.Popen(secrets.around(["python", "their_code.py"]))
    """

    program: str
    hidden: tuple[Path, ...]

    def around(self, command: Sequence[str]) -> list[str]:
        """The command line by which this runs without a view of them."""
        if not self.hidden:
            return list(command)
        over = [word for folder in self.hidden for word in ("--tmpfs", str(folder))]
        return [
            *(self.program, "--dev-bind", "/", "/", *over),
            *("--unshare-pid", "--proc", "/proc", "--die-with-parent", "--", *command),
        ]

    def exit_code(self, code: int) -> int:
        """Of what bwrap ran, with the number of a signal below 0, from what bwrap ended with."""
        return _SIGNALLED - code if self.hidden and code > _SIGNALLED else code


NOTHING_HIDDEN = HiddenSecrets("", ())
"""For what makes sandboxes itself, which it could not where secrets are hidden."""


@cache
def hide_secrets(*folders: Path) -> HiddenSecrets:
    """Hides these folders, tried out; where this machine cannot, the log says why, and nothing is hidden."""
    if not folders:
        return NOTHING_HIDDEN
    secrets = HiddenSecrets(shutil.which("bwrap") or "", folders)
    reason = "there is no bwrap in the PATH; install the package bubblewrap" if not secrets.program else _try(secrets)
    if not reason:
        return secrets
    names = ", ".join(map(str, folders))
    logger.warning("rewards and agents could read %s, if they looked for it: nothing hides it here: %s", names, reason)
    return NOTHING_HIDDEN


def _try(secrets: HiddenSecrets) -> str:
    """Why they cannot be hidden; "" if they can."""
    try:
        tried = subprocess.run(secrets.around(["true"]), capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if tried.returncode == 0 else tried.stderr.strip() or f"bwrap ended with {tried.returncode}"
