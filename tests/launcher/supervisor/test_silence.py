"""Silence: what counts as a sign of life, and what of the time that passes counts as silence."""

import pytest

from corral.experiments.trial.worker_record import WorkerRecord
from corral.launcher.supervisor.silence import LOOK_INTERVAL_S, Silence

WORKER = "rollout_worker/0"


def record(beat: float, *, pid: int = 1, is_setting_up: bool = False) -> dict[str, WorkerRecord]:
    return {WORKER: WorkerRecord(beat=beat, pid=pid, is_setting_up=is_setting_up)}


class Watched:
    """A worker that was started, and looks at it that are as far apart as the product's."""

    def __init__(self) -> None:
        self.silence = Silence(running_s=60.0, setup_s=600.0)
        self.silence.started(WORKER)
        self.now = 0.0

    def look(self, records: dict[str, WorkerRecord] | None, *, after_s: float = LOOK_INTERVAL_S) -> bool:
        self.now += after_s
        return WORKER in self.silence.looked(records, self.now)

    def seconds_until_silent(self, records: dict[str, WorkerRecord]) -> float:
        began = self.now
        while not self.look(records):
            assert self.now - began < 2000.0
        return self.now - began


def test_a_worker_whose_record_stands_still_or_is_gone_is_silent_after_its_time() -> None:
    for still in (record(1.0), {}):
        watched = Watched()
        watched.look(record(0.5))
        watched.look(record(1.0))
        assert watched.seconds_until_silent(still) == pytest.approx(60.0, abs=LOOK_INTERVAL_S)


def test_a_worker_that_beats_is_never_silent() -> None:
    watched = Watched()
    assert not any(watched.look(record(float(beat))) for beat in range(1000))


@pytest.mark.parametrize("records", [{}, record(1.0, is_setting_up=True)])
def test_one_that_was_not_heard_yet_or_sets_up_has_the_time_of_a_setup(records: dict[str, WorkerRecord]) -> None:
    watched = Watched()
    watched.look(records)
    watched.look(records)
    assert watched.seconds_until_silent(records) == pytest.approx(600.0, abs=2 * LOOK_INTERVAL_S)


def test_what_a_predecessor_said_last_is_no_sign_of_a_worker_that_was_started_again() -> None:
    watched = Watched()
    watched.look(record(0.5))
    watched.look(record(1.0))
    watched.silence.started(WORKER)
    assert watched.seconds_until_silent(record(1.0)) > 590.0


def test_an_outage_of_redis_and_a_suspended_machine_are_not_silence() -> None:
    watched = Watched()
    watched.look(record(0.5))
    watched.look(record(1.0))
    for _ in range(20):
        assert not watched.look(record(1.0))
    assert not any(watched.look(None) for _ in range(1000))
    assert not any(watched.look({}) for _ in range(20))  # workers need a while to be in the new Redis
    assert not watched.look({}, after_s=100_000.0)
    assert not watched.look(record(2.0))


def test_a_redis_that_answers_no_look_for_long_is_frozen_and_one_that_was_started_since_is_not() -> None:
    watched = Watched()
    for _ in range(3):
        watched.look(None)
    watched.look({})
    for _ in range(3):
        watched.look(None)
        assert not watched.silence.is_redis_frozen
    watched.look(None)
    assert watched.silence.is_redis_frozen
    watched.silence.redis_started(watched.now + 10.0)
    for _ in range(4):  # begun before it was there, and told later
        watched.look(None)
    assert not watched.silence.is_redis_frozen
