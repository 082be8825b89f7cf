"""Whether a Redis server that has not ended still answers: one that is frozen keeps its port and its clients, silent.

thread: connect, prove, PING --any answer--> silent = 0
                    +---none in time--> silent + 1 --too many in a row--> is_frozen
"""

import threading
from dataclasses import dataclass, field

from corral.experiments.trial.trust import Trust
from corral.launcher.trial.redis_server import answers


@dataclass(slots=True, kw_only=True)
class RedisProbe:
    """Asks one server again and again, in a thread that does not keep the process alive."""

    trust: Trust
    timeout_s: float = 2.0
    pause_s: float = 1.0
    max_silent: int = 5
    """One or two are missed by a machine that was suspended with all that runs on it."""
    _address: tuple[str, int] | None = None
    _silent: int = 0
    _thread: threading.Thread | None = None
    _changed: threading.Event = field(default_factory=threading.Event)

    @property
    def is_frozen(self) -> bool:
        """Whether the server has not answered for some time."""
        return self._silent >= self.max_silent

    def begin(self, address: tuple[str, int]) -> None:
        """A server has been started, or started again, and answers there."""
        self._address = address
        self._silent = 0
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="redis-probe", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """There is no server any more."""
        self._address = None
        self._silent = 0

    def _watch(self) -> None:
        while True:
            self._changed.clear()
            address = self._address
            if address is not None:
                is_silent = not answers(address, self.trust, timeout_s=self.timeout_s)
                if address == self._address and not self._changed.is_set():
                    self._silent = self._silent + 1 if is_silent else 0
            self._changed.wait(self.pause_s)
