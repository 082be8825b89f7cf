"""What updates have moved in all, and when an alarm ends, beside slow loops."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from corral.workers.algorithms.functional.logprob_gap import Alarm, Comparison, Drift

comparisons = st.builds(
    Comparison,
    num_tokens=st.integers(0, 50),
    of_allowed=st.sampled_from([0.0, 1.0, 1.5]),
    mean=st.floats(0.01, 5.0),
    shows=st.sampled_from([0.0, 0.5, 10.0]),
)
steps = st.lists(st.lists(comparisons, max_size=2), max_size=30)


def drift_of(moved: dict[int, float]) -> Drift:
    drift = Drift()
    for version, distance in moved.items():
        drift = drift.after(version, distance)
    return drift


@given(
    st.dictionaries(st.integers(0, 12), st.floats(0.0, 2.0), max_size=12),
    st.lists(st.integers(0, 12), max_size=20),
    st.integers(0, 12),
)
def test_drift_adds_up_over_updates_and_is_unknown_where_one_is(
    moved: dict[int, float], made: list[int], version: int
) -> None:
    found = drift_of(moved).since(np.array(made, np.int64), version=version)
    assert len(found) == len(made)
    for start, total in zip(made, found.tolist(), strict=True):
        updates = [moved.get(update) for update in range(start, version)]
        if None in updates:
            assert math.isnan(total)
        else:
            assert total == sum(update for update in updates if update is not None)


def test_the_oldest_updates_are_forgotten_and_one_that_is_made_again_counts_anew() -> None:
    drift = drift_of({version: 1.0 for version in range(100)})
    assert min(drift.moved) == 36 and len(drift.moved) == 64
    assert drift.after(99, 3.0).since(np.array([98]), version=100).tolist() == [4.0]


@given(steps)
def test_an_alarm_ends_by_as_many_tokens_as_raised_it_and_would_have_shown_it(looks: list[list[Comparison]]) -> None:
    alarm, owed = Alarm(), 0
    for look in looks:
        before, alarm = alarm, alarm.after(look)
        beyond = [one for one in look if one.is_beyond]
        if beyond:
            owed = max(owed, sum(one.num_tokens for one in beyond))
            assert alarm.is_raised
        elif before.is_raised:
            owed -= sum(one.num_tokens for one in look if 2 * one.shows <= before.mean)
            assert alarm.is_raised is (owed > 0)
        else:
            assert not alarm.is_raised
        owed = max(owed, 0)
        if not any(one.num_tokens for one in look):
            assert alarm == before


@given(steps)
def test_nothing_but_what_is_beyond_raises_an_alarm(looks: list[list[Comparison]]) -> None:
    alarm = Alarm()
    for look in looks:
        alarm = alarm.after([one for one in look if not one.is_beyond])
        assert not alarm.is_raised
