"""Name services for tests: one inside a process, and a real Redis for tests whose workers are processes of their own.

    MemoryNameService(store) --\\
    MemoryNameService(store) ---+--> MemoryStore: one dict, one lock
    running_names() --NamesAddress, to any process--> connect() --> RedisNameService
"""

import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from corral.experiments.trial.trust import Trust
from corral.launcher.trial.redis_server import REDIS_USERNAME, RedisServer
from corral.name_resolve.base import NameService, Put, check_root
from corral.name_resolve.redis import RedisNameService
from tests.workers.trusted import trust

PREFIX = "corral/0123456789abcdef0123456789abcdef/"


@dataclass(slots=True)
class MemoryStore:
    """Records that several services of one process share: what was put, and until when (monotonic seconds)."""

    lock: threading.Condition = field(default_factory=threading.Condition)
    records: dict[str, tuple[Put, float]] = field(default_factory=dict)
    num_changes: Counter[str] = field(default_factory=Counter)
    """By root."""

    def living(self) -> dict[str, Put]:
        now_s = time.monotonic()
        return {name: put for name, (put, until_s) in sorted(self.records.copy().items()) if now_s < until_s}

    def mark(self, name: str) -> None:
        self.num_changes[name.rpartition("/")[0]] += 1
        self.lock.notify_all()

    def newer(self, seen: Mapping[str, str]) -> dict[str, str]:
        marks = {root: str(self.num_changes[root] or "") for root in seen}
        return {root: mark for root, mark in marks.items() if mark != seen[root]}


class MemoryNameService(NameService):
    """Held to what Redis does by tests/name_resolve/test_conformance.py."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        super().__init__(described="the memory name service")
        self._store = MemoryStore() if store is None else store

    def _put(self, puts: Sequence[Put], *, patience_s: float | None = None) -> list[str]:
        with self._store.lock:
            return [self._put_one(put) for put in puts]

    def _put_one(self, put: Put) -> str:
        stored = self._store.living().get(put.name)
        if stored is not None and not put.replace and stored.owner != put.owner:
            return stored.owner
        until_s = float("inf") if put.ttl_s is None else time.monotonic() + put.ttl_s
        self._store.records[put.name] = (put, until_s)
        if stored is None or (stored.owner, stored.value) != (put.owner, put.value):
            self._store.mark(put.name)
        return ""

    def _remove(self, name: str, *, owner: str | None, patience_s: float | None = None) -> None:
        with self._store.lock:
            stored = self._store.living().get(name)
            if stored is not None and owner in (None, stored.owner):
                del self._store.records[name]
                self._store.mark(name)

    def _fetch(self, name: str, *, patience_s: float | None = None) -> str | None:
        stored = self._store.living().get(name)
        return None if stored is None else stored.value

    def get_subtree(self, root: str) -> dict[str, str]:
        return {
            name: put.value
            for name, put in self._store.living().items()
            if not check_root(root) or name == root or name.startswith(f"{root}/")
        }

    def changes(self, seen: Mapping[str, str], *, timeout_s: float) -> dict[str, str]:
        assert all(check_root(root) == root for root in seen)
        with self._store.lock:
            self._store.lock.wait_for(lambda: self._store.newer(seen), timeout=timeout_s)
            return self._store.newer(seen)

    def clock(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class NamesAddress:
    """Where a test's Redis is; a child process may be given it."""

    host: str
    port: int
    password: str
    identity: Path
    """The folder of the key by which the server is known."""

    def connect(self) -> RedisNameService:
        return RedisNameService(
            self.host, self.port, self.password, PREFIX, REDIS_USERNAME, tls=Trust(self.identity).client()
        )


@contextmanager
def running(server: RedisServer) -> Iterator[RedisServer]:
    """The server for the length of a block, which ends it and removes what it has on this host."""
    with ExitStack() as stack:
        stack.callback(lambda: server._listener and server._listener.close())
        stack.callback(lambda: server._folder and shutil.rmtree(server._folder))
        stack.callback(server._end_processes)
        server.start()
        yield server


@contextmanager
def running_names() -> Iterator[NamesAddress]:
    """A Redis server of the test's own, for the length of a block."""
    password = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="names-") as folder,
        running(
            RedisServer(password=password, trust=trust(), key_prefix=PREFIX, log_path=Path(folder, "redis.log"))
        ) as server,
    ):
        yield NamesAddress(*server.address, password, trust().secrets_directory)
