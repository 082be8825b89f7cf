"""One polite poller for all trials and all commands of a user: squeue's answer is shared through a file.

    rl-status, rl-status -w, rl-logs -f, rl-submit --wait of one machine
         |  look(newer_than)
         v
    CachedQueue --old enough, or older than a submission?--> lock --> squeue --> $XDG_CACHE_HOME/corral/queue-*.json
         |  no: what the file holds
         v
    QueueAnswer: jobs, when SLURM said so, and since when it does not answer any more

After a failure the last known jobs stay, and SLURM is asked again after 5, 10, 20, ... 60 seconds: a controller that
is down or overloaded is not helped by being asked more often. The cache is a convenience: where it cannot be written,
SLURM is asked directly.
"""

import hashlib
import os
import secrets as random_tokens
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from corral.launcher.cluster.own_jobs import JobIndex
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.slurm.parse import QueuedJob, parse_queue
from corral.launcher.trial.lock import LockAnswer, try_lock

FRESH_S = 5.0
_MAX_PAUSE_S = 60.0
_LOCK_PATIENCE_S = 15.0  # whoever holds the lock asks SLURM, which takes ten seconds at most
_LOCK_POLL_S = 0.05
_ACCOUNTING_FRESH_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class QueueAnswer:
    """What SLURM said last, and whether it still answers."""

    jobs: tuple[QueuedJob, ...] = ()
    asked_at: float | None = None
    """When SLURM gave these jobs (Unix time); None if it has never answered."""
    unreachable_since: float | None = None
    error: str = ""
    """Why SLURM did not answer, one line."""
    index: JobIndex = field(init=False, repr=False, compare=False)
    """The jobs by trial. Made at once, and not by each of the threads that need it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", JobIndex.of(self.jobs))


class Queue(Protocol):
    """Where a status reader has SLURM's jobs from."""

    def look(self, *, newer_than: float = 0.0) -> QueueAnswer:
        """The user's jobs; not older than a moment that has passed, such as that of a submission."""

    def has_accounting(self) -> bool:
        """Whether the site keeps accounts, so that sacct knows jobs which SLURM has forgotten."""


class DirectQueue:
    """Asks SLURM each time: for programs that wait for one trial, and for tests."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client

    def look(self, *, newer_than: float = 0.0) -> QueueAnswer:
        now = time.time()
        try:
            return QueueAnswer(jobs=tuple(self._client.queue()), asked_at=now)
        except SlurmError as error:
            return QueueAnswer(unreachable_since=now, error=_one_line(error))

    def has_accounting(self) -> bool:
        return keeps_accounts(self._client.accounting_storage())


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    text: str = ""
    """squeue's output."""
    asked_at: float | None = None
    tried_at: float = 0.0
    failures: int = 0
    unreachable_since: float | None = None
    error: str = ""
    accounting: str = ""
    accounting_asked_at: float | None = None

    def answered(self, text: str, now: float) -> "Memory":
        """After SLURM has answered."""
        return msgspec.structs.replace(
            self, text=text, asked_at=now, tried_at=now, failures=0, unreachable_since=None, error=""
        )

    def failed(self, error: str, now: float) -> "Memory":
        """After it has not: what it said before stays."""
        since = now if self.unreachable_since is None else self.unreachable_since
        return msgspec.structs.replace(
            self, tried_at=now, failures=self.failures + 1, unreachable_since=since, error=error
        )

    def is_due(self, now: float, newer_than: float) -> bool:
        """Whether SLURM is to be asked. Pure."""
        if self.tried_at > now:  # the clock was set back
            return True
        if self.failures:
            return now - self.tried_at >= pause_after(self.failures)
        if self.asked_at is None or now - self.asked_at >= FRESH_S:
            return True
        # A moment in the future is another machine's clock; asking would not make the answer newer than it.
        return self.asked_at < newer_than <= now


def pause_after(failures: int) -> float:
    """Seconds before SLURM is asked again after so many failures in a row."""
    return min(_MAX_PAUSE_S, FRESH_S * 2.0 ** min(failures - 1, 10))


class CachedQueue:
    """Asks SLURM at most every five seconds, whatever the number of commands that look."""

    def __init__(
        self, client: SlurmClient, *, path: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._path = path or cache_path()
        self._clock = clock

    def look(self, *, newer_than: float = 0.0) -> QueueAnswer:
        memory = self._read()
        if not memory.is_due(self._clock(), newer_than):
            return _answer_of(memory)
        try:
            with self._lock() as has_lock:
                memory = self._read()  # whoever had the lock before us has asked, perhaps
                if has_lock and memory.is_due(self._clock(), newer_than):
                    memory = self._ask(memory)
                    self._write(memory)
        except OSError:
            memory = self._ask(memory)
        return _answer_of(memory)

    def has_accounting(self) -> bool:
        memory = self._read()
        asked_at = memory.accounting_asked_at
        if asked_at is None or self._clock() - asked_at >= _ACCOUNTING_FRESH_S:
            now, storage = self._clock(), self._client.accounting_storage()
            memory = msgspec.structs.replace(self._read(), accounting=storage, accounting_asked_at=now)
            try:
                self._write(memory)
            except OSError:
                return keeps_accounts(storage)
        return keeps_accounts(memory.accounting)

    def _ask(self, memory: Memory) -> Memory:
        try:
            text = self._client.queue_text()
        except SlurmError as error:
            return memory.failed(_one_line(error), self._clock())
        return memory.answered(text, self._clock())

    def _read(self) -> Memory:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Memory)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return Memory()

    def _write(self, memory: Memory) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Not atomic_write: a cache need not survive a crash, so nothing is forced to disk.
        temporary = self._path.with_name(f".{self._path.name}.{random_tokens.token_hex(4)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(memory))
            temporary.rename(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        """Yields whether we are the one who asks; after a while without the lock, what is known has to do."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield _wait_for_lock(descriptor, time.monotonic() + _LOCK_PATIENCE_S)
        finally:
            os.close(descriptor)


def cache_path() -> Path:
    """The file of this user on this machine, and of the cluster that it asks.

    Several clusters may share a home folder, and each numbers its jobs. A machine asks one of them, unless its
    environment names another; and the times in the file are those of one clock.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    cluster = [os.uname().nodename, *(os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS"))]
    name = hashlib.sha256("|".join(cluster).encode(errors="surrogateescape")).hexdigest()[:12]
    return (Path(root) if root else Path.home() / ".cache") / "corral" / f"queue-{name}.json"


def keeps_accounts(storage: str) -> bool:
    """Whether `AccountingStorageType` names a place."""
    return bool(storage) and not storage.endswith("/none") and storage != "(null)"


def _wait_for_lock(descriptor: int, deadline: float) -> bool:
    """Where there are no locks, each asks for itself."""
    while try_lock(descriptor) is LockAnswer.BUSY:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOCK_POLL_S)
    return True


def _answer_of(memory: Memory) -> QueueAnswer:
    return QueueAnswer(
        jobs=tuple(parse_queue(memory.text)),
        asked_at=memory.asked_at,
        unreachable_since=memory.unreachable_since,
        error=memory.error,
    )


def _one_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
