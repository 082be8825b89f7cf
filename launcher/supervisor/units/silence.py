"""Which workers have said nothing for too long: looks at their leased records in, the silent ones out. Pure.

look, every two seconds --> beat has moved: 0 s      it has not: + the time since the look before
Redis did not answer ------> nothing counts, and all begin at 0 again when it does

Guarantee: silence counts only while both this watcher and Redis were well: of a gap between two looks, as of a machine
that was suspended, no more counts than looks are apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from corral.experiments.trial.worker_record import WorkerRecord

LOOK_INTERVAL_S = 2.0
"""A worker's beat moves as often."""


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

    def started(self, task: str) -> None:
        """A process begins; what its predecessor said last is no sign of it."""
        before = self._lives.get(task)
        self._lives[task] = _Life(beat=before.beat if before else None, limit_s=self._setup_s)

    def looked(self, records: Mapping[str, WorkerRecord] | None, now: float) -> dict[str, float]:
        """Those that are silent for too long, and for how many seconds.

        Args:
            records: by kind/index; None if Redis did not answer.
        """
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
