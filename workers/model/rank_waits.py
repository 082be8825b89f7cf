"""RankWaits: how long this training rank is held up by the others.

    main thread ──twenty times a second: where is it?──► in torch.distributed ──► note(seconds since the look before)

All ranks of a mesh end a call at the same time, since each layer of it needs all of them; the slow one is the one that
never waits. Where collectives run on a GPU the host does not wait in them, and this sees only what holds up a host.
"""

import sys
import threading
import time
from collections.abc import Callable
from inspect import getfile
from pathlib import Path
from typing import Final

import torch.distributed as dist

from corral.workers.streams.closing import Closing

_LOOK_S: Final = 0.05
_OF_RANKS: Final = str(Path(getfile(dist)).parent)


class RankWaits(Closing):
    """Looks at the thread that makes it, until it is closed."""

    def __init__(self, note: Callable[[float], None]) -> None:
        """note: has the seconds that were spent in a call of torch.distributed, as far as looks tell."""
        self._note = note
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="rank waits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _look_on(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(_LOOK_S):
            frame, now = sys._current_frames().get(self._watched), time.monotonic()
            if frame is not None and frame.f_code.co_filename.startswith(_OF_RANKS):
                self._note(min(now - looked, 2 * _LOOK_S))  # a process that was stopped has waited for nobody
            looked = now
