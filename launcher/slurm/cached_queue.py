"""One polite poller for all trials and all commands of a user: the cluster's answer is shared through a file.

    rl-status, rl-status -w, rl-logs -f, rl-submit --wait of one machine
         |  look(newer_than)
         v
    CachedQueue --old enough, or older than a submission?--> lock --> jobs --> $XDG_CACHE_HOME/corral/queue-*.json
         |  no: what the file holds
         v
    QueueAnswer: jobs, when the cluster said so, and since when it does not answer any more

After a failure the last known jobs stay, and it is asked again after 5, 10, 20, ... 60 seconds: a controller that
is down or overloaded is not helped by being asked more often. The cache is a convenience: where it cannot be written,
the cluster is asked directly.
"""

import hashlib
import os
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import msgspec

from corral.experiments.trial.directory import atomic_write
from corral.experiments.trial.flocks import opened
from corral.launcher.cluster.errors import ClusterError
from corral.launcher.cluster.jobs import Job
from corral.launcher.cluster.own_jobs import JobIndex
from corral.launcher.files.patience import wait_until
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.trial.lock import LockAnswer, try_lock
from corral.scheduling.restarts import growing_pause

FRESH_S = 5.0
_MAX_PAUSE_S = 60.0
_LOCK_PATIENCE_S = 15.0  # whoever has the lock asks the cluster, which takes ten seconds at most
_LOCK_POLL_S = 0.05


class QueueAnswer(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What the cluster said last, and whether it still answers; as the file holds it."""

    jobs: tuple[Job, ...] = ()
    asked_at: float | None = None
    """When it gave these jobs (Unix time); None if it has never answered."""
    tried_at: float = 0.0
    failures: int = 0
    """In a row."""
    unreachable_since: float | None = None
    error: str = ""
    """Why it did not answer, one line."""
    question: str = ""
    """What people type to see the same."""

    @cached_property
    def index(self) -> JobIndex:
        """The jobs by trial."""
        return JobIndex.of(self.jobs)

    def after_asking(self, cluster: SlurmQueue, clock: Callable[[], float]) -> "QueueAnswer":
        """What is known once the cluster has been asked; if it has not answered, what it said before stays."""
        try:
            jobs, now = tuple(cluster.jobs()), clock()
        except ClusterError as error:
            return msgspec.structs.replace(
                self,
                question=cluster.question,
                tried_at=(now := clock()),
                failures=self.failures + 1,
                unreachable_since=now if self.unreachable_since is None else self.unreachable_since,
                error=str(error).partition("\n")[0],
            )
        return QueueAnswer(jobs=jobs, asked_at=now, tried_at=now, question=cluster.question)

    def is_due(self, now: float, newer_than: float) -> bool:
        """Whether the cluster is to be asked. Pure."""
        if self.tried_at > now:  # the clock was set back
            return True
        if self.failures:
            return now - self.tried_at >= pause_after(self.failures)
        if self.asked_at is None or now - self.asked_at >= FRESH_S:
            return True
        # A moment in the future is another machine's clock; asking would not make the answer newer than it.
        return self.asked_at < newer_than <= now


def pause_after(failures: int) -> float:
    """Seconds before it is asked again after so many failures in a row."""
    return growing_pause(failures, first_s=FRESH_S, longest_s=_MAX_PAUSE_S)


class CachedQueue:
    """Asks at most every five seconds, whatever the number of commands that look."""

    def __init__(
        self, cluster: SlurmQueue, *, path: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._cluster = cluster
        self._path = path or cache_path(cluster)
        self._clock = clock

    def look(self, *, newer_than: float = 0.0) -> QueueAnswer:
        memory = self._read()
        if not memory.is_due(self._clock(), newer_than):
            return memory
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with opened(self._path.with_suffix(".lock")) as descriptor:
                # Where there are no locks, each asks for itself; after a while without it, what is known has to do.
                may_ask = wait_until(
                    lambda: try_lock(descriptor) is not LockAnswer.BUSY,
                    timeout_s=_LOCK_PATIENCE_S,
                    pause_s=_LOCK_POLL_S,
                )
                memory = self._read()  # whoever had the lock before us has asked, perhaps
                if may_ask and memory.is_due(self._clock(), newer_than):
                    memory = memory.after_asking(self._cluster, self._clock)
                    said = msgspec.json.encode(memory)
                    atomic_write(self._path, said, is_durable=False)  # it need not survive a crash
        except OSError:
            memory = memory.after_asking(self._cluster, self._clock)
        return memory

    def _read(self) -> QueueAnswer:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=QueueAnswer)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return QueueAnswer()


def cache_path(cluster: SlurmQueue) -> Path:
    """The file of this user on this machine, and of the cluster that it asks.

    Several clusters may share a home folder, and each numbers its jobs. A machine asks one of them, unless its
    environment names another; and the times in the file are those of one clock.
    """
    asked = f"{os.uname().nodename}|{cluster.identity}"
    name = hashlib.sha256(asked.encode(errors="surrogateescape")).hexdigest()[:12]
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "corral" / f"queue-{name}.json"
