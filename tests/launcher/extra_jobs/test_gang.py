"""The gang guard: no trial holds half of its nodes for long, and two that do get out of each other's way."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.launcher.extra_jobs import GangGuard

NAMES = ("model_worker", "generation_server")


def guard(*, timeout_s: float = 60.0, seed: int = 0) -> GangGuard:
    return GangGuard(NAMES, timeout_s=timeout_s, chance=random.Random(seed))


def test_time_in_the_queue_counts_only_while_nodes_are_there() -> None:
    gang = guard(timeout_s=60.0)
    for now in range(0, 100_000, 1000):
        assert gang.look(set(), float(now)) is None
    assert gang.look({"model_worker"}, 100_000.0) is None
    assert gang.look({"model_worker"}, 100_059.0) is None
    given_back = gang.look({"model_worker"}, 100_060.0)
    assert given_back is not None
    assert (given_back.waited_s, given_back.missing) == (60.0, ("generation_server",))


def test_a_gang_that_lost_a_job_keeps_its_other_steps_until_the_time_is_over() -> None:
    gang = guard()
    gang.look(set(NAMES), 0.0)
    assert gang.look({"model_worker"}, 100.0) is None and gang.is_assembled
    assert gang.look({"model_worker"}, 160.0) is not None and not gang.is_assembled


@given(st.integers(0, 1000))
def test_pauses_grow_and_are_spread_over_their_bounds(seed: int) -> None:
    gang, now = guard(timeout_s=60.0, seed=seed), 0.0
    for backoff_s in (6.0, 12.0, 24.0, 48.0):
        gang.look({"model_worker"}, now)
        now += 60.0
        given_back = gang.look({"model_worker"}, now)
        assert given_back is not None
        assert 0.5 * backoff_s <= given_back.pause_s <= 1.5 * backoff_s
    gang.look(set(NAMES), now)  # a success is forgotten failure
    gang.look({"model_worker"}, now)
    given_back = gang.look({"model_worker"}, now + 60.0)
    assert given_back is not None and given_back.pause_s <= 9.0


@dataclass
class _Trial:
    gang: GangGuard
    granted: dict[str, int] = field(default_factory=dict)
    ask_at: float = 0.0
    asked: bool = False
    done_at: float | None = None


@pytest.mark.parametrize("seed", range(40))
def test_two_trials_that_each_need_the_whole_cluster_both_finish_whatever_the_order(seed: int) -> None:
    """A cluster of four nodes that starts the jobs of its queue in turn, and trials of two jobs with two nodes."""
    chance = random.Random(seed)
    trials = [_Trial(guard(timeout_s=20.0, seed=2 * seed + index)) for index in range(2)]
    queue: list[tuple[_Trial, str]] = []
    free, give_backs = 4, 0
    for second in range(4000):
        now = second / 2
        if all(trial.done_at is not None for trial in trials):
            break
        for trial in trials:
            if not trial.asked and trial.done_at is None and now >= trial.ask_at:
                trial.asked = True
                queue += [(trial, name) for name in NAMES]
                chance.shuffle(queue)
        while queue and free >= 2:
            trial, name = queue.pop(0)
            trial.granted[name] = 2
            free -= 2
        for trial in trials:
            if trial.done_at is not None:
                continue
            given_back = trial.gang.look(set(trial.granted), now)
            if trial.gang.is_assembled:
                trial.done_at = now
            if given_back is not None or trial.done_at is not None:
                free += sum(trial.granted.values())
                trial.granted.clear()
                queue = [entry for entry in queue if entry[0] is not trial]
                trial.asked = False
            if given_back is not None:
                give_backs += 1
                trial.ask_at = now + given_back.pause_s
    assert all(trial.done_at is not None for trial in trials), give_backs
    assert free == 4
