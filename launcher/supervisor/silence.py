"""Workers without a heartbeat for too long: the leased records of an attempt's workers in, the silent workers out.

Redis --LeaseWatch, a thread, every two seconds--> records, or None where it does not answer --Silence, pure--> who
    its beat has moved: 0 s      it has not: + the time since the look before
    Redis did not answer: no worker's silence counts, and all begin at 0 again when it does; several times in a row: it
    is frozen, and keeps its port and its clients as long as it lives

Guarantee: silence of workers counts only while both this watcher and Redis were well: of a gap between two looks, as of
a machine that was suspended, no more counts than looks are apart.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.worker_record import WorkerRecord
from corral.launcher.trial.redis_server import connect_name_service, read_worker_records
from corral.name_resolve.base import NameService, NameServiceError
from corral.name_resolve.keys import WORKERS_ROOT

LOOK_INTERVAL_S = 2.0
"""A worker's beat moves as often."""
_TIMEOUT_S = 1.0
_MAX_KEPT = 30
_MAX_UNANSWERED = 4  # one or two are missed by a machine that was suspended with all that runs on it
REDIS_SILENCE_S = _MAX_UNANSWERED * LOOK_INTERVAL_S

Look = tuple[float, Mapping[str, WorkerRecord] | None]
"""When it began (monotonic seconds), and the records by kind/index; None if Redis did not answer."""


class LeaseWatch:
    """Looks from `begin` on, until the process ends; the supervisor's loop waits for no Redis."""

    def __init__(self, directory: TrialDirectory, trial_uuid: str) -> None:
        self._directory = directory
        self._trial_uuid = trial_uuid
        self._looks: deque[Look] = deque(maxlen=_MAX_KEPT)

    def begin(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._watch, name="leases", daemon=True).start()

    def take(self) -> list[Look]:
        """What was seen since the last call."""
        return [self._looks.popleft() for _ in range(len(self._looks))]

    def _watch(self) -> None:
        names: NameService | None = None
        while True:
            # Where Redis is, which is said once it answers, it stays; what files refuse says nothing of it.
            with contextlib.suppress(OSError, ValueError):
                names = names or connect_name_service(self._directory, self._trial_uuid, timeout_s=_TIMEOUT_S)
                began_at, records = time.monotonic(), None
                with contextlib.suppress(NameServiceError):
                    records = read_worker_records(names, WORKERS_ROOT)
                self._looks.append((began_at, records))
            time.sleep(LOOK_INTERVAL_S)


@dataclass(slots=True)
class _Life:
    beat: tuple[float, int] | None = None
    silent_s: float = 0.0
    limit_s: float = 0.0


class Silence:
    """Counts, for every task that was started.

    Args:
        running_s: the longest silence of a worker that works.
        setup_s: of one that becomes ready, or was not heard yet: an import may hold its interpreter for long.
    """

    def __init__(self, *, running_s: float, setup_s: float) -> None:
        self._running_s = running_s
        self._setup_s = setup_s
        self._lives: dict[str, _Life] = {}
        self._looked_at: float | None = None
        self._redis_since = float("-inf")
        self._num_unanswered = 0

    def started(self, task: str) -> None:
        """A process begins; what its predecessor said last is no sign of it."""
        before = self._lives.get(task)
        self._lives[task] = _Life(beat=before.beat if before else None, limit_s=self._setup_s)

    def redis_started(self, now: float) -> None:
        """Redis answers, or is being ended: what it left unanswered before does not count."""
        self._redis_since, self._num_unanswered = now, 0

    @property
    def is_redis_frozen(self) -> bool:
        """Whether Redis has not answered for some time."""
        return self._num_unanswered >= _MAX_UNANSWERED

    def looked(self, records: Mapping[str, WorkerRecord] | None, now: float) -> dict[str, float]:
        """Those that are silent for too long, and for how many seconds.

        Args:
            records: by kind/index; None if Redis did not answer.
        """
        self._num_unanswered = self._num_unanswered + (now >= self._redis_since) if records is None else 0
        if records is None or self._looked_at is None:
            self._looked_at = None if records is None else now
            for life in self._lives.values():
                life.silent_s = 0.0
            return {}
        passed_s = min(now - self._looked_at, 2 * LOOK_INTERVAL_S)
        self._looked_at = now
        for task, life in self._lives.items():
            record = records.get(task)
            beat = (record.beat, record.pid) if record is not None else None
            if record is None or beat == life.beat:
                life.silent_s += passed_s
            else:
                limit_s = self._setup_s if record.is_setting_up else self._running_s
                self._lives[task] = _Life(beat=beat, limit_s=limit_s)
        return {task: life.silent_s for task, life in self._lives.items() if life.silent_s > life.limit_s}
