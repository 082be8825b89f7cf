"""When something is due again: beside a slow count of every step, over restarts, and in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.cadence import BEFORE_THE_RUN, Cadence, Frequency, TrainingProgress, parse_frequency

STEPS_PER_PASS = 4


def moment(step: int, *, time_s: float = 0.0) -> TrainingProgress:
    return TrainingProgress(step=step, passes=step // STEPS_PER_PASS, time_s=time_s)


def due_steps(every: Frequency, times: list[float], *, first: int = 1) -> list[int]:
    """The steps from `first` on after which something was due, and done."""
    cadence = Cadence(every, last=moment(first - 1, time_s=times[0]))
    done = []
    for step, time_s in enumerate(times, start=first):
        if cadence.is_due(now := moment(step, time_s=time_s)):
            cadence.note(now)
            done.append(step)
    return done


@given(
    steps=st.none() | st.integers(1, 5),
    passes=st.none() | st.integers(1, 3),
    seconds=st.none() | st.floats(0.5, 5.0),
    waits=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=30),
)
def test_whichever_is_due_first_counts(
    steps: int | None, passes: int | None, seconds: float | None, waits: list[float]
) -> None:
    times = [sum(waits[:n]) for n in range(len(waits))]
    expected, last_s = [], times[0]
    for step, time_s in enumerate(times, start=1):
        by_step = steps is not None and step % steps == 0
        by_pass = passes is not None and step % STEPS_PER_PASS == 0 and step // STEPS_PER_PASS % passes == 0
        by_time = seconds is not None and time_s - last_s >= seconds
        if by_step or by_pass or by_time:
            expected.append(step)
            last_s = time_s
    assert due_steps(Frequency(steps=steps, passes=passes, seconds=seconds), times) == expected


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 29))
def test_a_restart_changes_neither_steps_nor_passes(steps: int, passes: int, restart: int) -> None:
    every, times = Frequency(steps=steps, passes=passes), [0.0] * 30
    both = due_steps(every, times[:restart]) + due_steps(every, times[restart:], first=restart + 1)
    assert both == due_steps(every, times)


@pytest.mark.parametrize("every", [Frequency(steps=7), Frequency(passes=3)])
def test_everything_that_counts_steps_or_passes_is_due_before_the_first_step(every: Frequency) -> None:
    last = TrainingProgress(step=BEFORE_THE_RUN, passes=BEFORE_THE_RUN, time_s=0.0)
    assert Cadence(every, last=last).is_due(moment(0))


def test_nothing_is_done_twice_after_one_step_however_long_it_lasts() -> None:
    cadence = Cadence(Frequency(seconds=1.0), last=moment(0))
    assert cadence.is_due(moment(3, time_s=2.0))
    cadence.note(moment(3, time_s=2.0))
    assert not cadence.is_due(moment(3, time_s=9.0))
    assert cadence.is_due(moment(4, time_s=9.0))


@pytest.mark.parametrize(
    ("every", "words"),
    [
        (Frequency(), "never"),
        (Frequency(steps=1, seconds=9.0), "after every step"),
        (Frequency(steps=20), "every 20 steps"),
        (Frequency(passes=1), "every epoch"),
        (Frequency(steps=20, passes=2, seconds=600.0), "every 20 steps or 2 epochs or 600 s"),
    ],
)
def test_a_frequency_says_what_it_is(every: Frequency, words: str) -> None:
    assert str(every) == words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 step", Frequency(steps=1)),
        ("20 steps or 1.5 hours", Frequency(steps=20, seconds=5400.0)),
        ("2 epochs or 10 minutes", Frequency(passes=2, seconds=600.0)),
    ],
)
def test_a_frequency_is_a_number_with_a_unit(text: str, expected: Frequency) -> None:
    assert parse_frequency(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "20", "0 steps", "1.5 steps", "5 fortnights", "steps", "1 step and 2 epochs", f"{'9' * 400} steps", "٣ steps"],
)
def test_a_frequency_without_a_number_or_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 20 steps or 10 minutes"):
        parse_frequency(text)


def test_a_frequency_says_each_kind_of_unit_once() -> None:
    with pytest.raises(ValueError, match="says twice"):
        parse_frequency("30 seconds or 1 minute")
