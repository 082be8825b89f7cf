"""Ties a child process to its parent: whatever ends the parent, SIGKILL included, ends the child.

    keeper --SIGKILL--> supervisor --SIGKILL--> worker of this machine, redis-server
                                  +--SIGTERM--> srun, which ends its step

The kernel sends the signal, so nobody has to be alive, or to look, for it to happen.
"""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_EXIT_ORPHANED = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL, *, parent: int | None = None) -> Callable[[], None]:
    """What `subprocess.Popen(preexec_fn=...)` runs in the child, between fork and exec: no orphan is ever started.

    To be used from the parent's main thread, as the kernel means the thread that forks. It takes no lock and imports
    nothing, so that other threads of the parent do not matter.

    Args:
        parent: None is this process; a process that ties itself names its own.
    """
    parent = parent or os.getpid()
    # Found before the fork; PyDLL keeps the interpreter's lock, which a forked child has nobody to share with.
    prctl = ctypes.PyDLL(None).prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it went away before the wish was registered
            os._exit(_EXIT_ORPHANED)

    return tie
