"""The name service inside one process, for tests and for runs with all workers in one process.

    MemoryNameService(store) --\\
    MemoryNameService(store) ---+--> MemoryStore: one dict, one lock, the monotonic clock
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from corral.name_resolve.table import Record, TableNameService


class MemoryStore:
    """Records that several `MemoryNameService`s of one process share.

    Args:
        clock: seconds that never step back; a test passes its own to let time pass.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}

    def now_s(self) -> float:
        return self._clock()

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._lock:
            yield

    def read(self, name: str) -> Record | None:
        return self._records.get(name)

    def create(self, name: str, record: Record) -> bool:
        return self._records.setdefault(name, record) is record

    def replace(self, name: str, record: Record) -> None:
        self._records[name] = record

    def remove(self, name: str) -> None:
        self._records.pop(name, None)

    def names(self) -> Iterable[str]:
        return list(self._records)


class MemoryNameService(TableNameService):
    """A name service over a `MemoryStore`; without one it has a store of its own."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        super().__init__(MemoryStore() if store is None else store, described="the memory name service")
