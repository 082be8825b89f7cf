"""What updates have moved in all, means and their errors, and when an alarm begins and ends."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.config.algorithm import LEAST_PROMPTS
from corral.workers.algorithms.functional.logprob_gap import Alarm, Drift, LogprobGap, MeanSize

BASE = 1e-3  # nats that rounding explains
EXACT = 1e-3


def gap_of(num_tokens: int, size: float = 0.0) -> LogprobGap:
    """Tokens of the trainer's version, all of which differ by so much."""
    sums = dict.fromkeys(("kl", "answers", "answers_beyond", "effect_squares", "effect_products"), 0.0)
    sums |= {"tokens": num_tokens, "unequal": num_tokens, "difference": size * num_tokens}
    return LogprobGap.of(sums | {"squares": size**2 * num_tokens}, {"difference": size, "negative": 0.0})


def mean_size(differences: list[list[float]]) -> MeanSize:
    """Of the tokens of some prompts."""
    prompts = np.repeat(np.arange(len(differences)), [len(tokens) for tokens in differences])
    return MeanSize.of(MeanSize.sums(np.array([d for tokens in differences for d in tokens]), prompts))


NONE = mean_size([])
SOUND, FOREIGN = mean_size([[0.01] * 30] * 20), mean_size([[1.0] * 30] * 20)


def after(alarm: Alarm, older: MeanSize, gap: LogprobGap | None = None, *, allowed: float = 0.01) -> Alarm:
    evidence = older.evidence(allowed, 0.1)
    return alarm.after(gap or gap_of(0), threshold=EXACT, older=older, allowed=allowed, evidence=evidence)


@given(
    st.dictionaries(st.integers(0, 12), st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0)), max_size=12),
    st.integers(0, 11),
    st.integers(1, 12),
)
def test_drift_adds_up_over_updates_and_is_unknown_where_one_is(
    moved: dict[int, tuple[float, float]], made: int, age: int
) -> None:
    drift = Drift()
    for version, (distance, variance) in moved.items():
        drift = drift.after(version, distance, variance)
    total, variance = drift.since(made, version=made + age)
    updates = [moved.get(update) for update in range(made, made + age)]
    known = [update for update in updates if update is not None]
    if len(known) < age:
        assert math.isnan(total) and variance == math.inf
    else:
        assert total == pytest.approx(math.fsum(size for size, _ in known))
        assert variance == max(error for _, error in known)


def test_the_oldest_updates_are_forgotten_and_one_that_is_made_again_counts_anew() -> None:
    drift = Drift()
    for version in range(100):
        drift = drift.after(version, 1.0, 0.1)
    assert min(drift.moved) == 36 and len(drift.moved) == 64
    assert drift.after(99, 3.0, 0.2).since(98, version=100) == (4.0, 0.2)
    assert math.isnan(drift.since(100, version=99)[0])  # the trainer has gone back to an earlier commit


tokens_of_prompts = st.lists(st.lists(st.floats(-2.0, 2.0), min_size=1, max_size=5), min_size=2, max_size=12)


@given(tokens_of_prompts, st.integers(0, 12))
def test_a_mean_and_its_error_are_those_of_a_slow_loop_however_prompts_are_spread_over_ranks(
    prompts: list[list[float]], cut: int
) -> None:
    sums = [
        MeanSize.sums(
            np.array([d for tokens in part for d in tokens], np.float64),
            np.repeat(np.arange(len(part)), [len(tokens) for tokens in part]),
        )
        for part in (prompts[:cut], prompts[cut:])
    ]
    found = MeanSize.of({name: sums[0][name] + sums[1][name] for name in sums[0]})
    num_tokens, count = sum(map(len, prompts)), len(prompts)
    mean = math.fsum(abs(d) for tokens in prompts for d in tokens) / num_tokens
    residuals = [math.fsum(map(abs, tokens)) - mean * len(tokens) for tokens in prompts]
    assert (found.num_tokens, found.num_prompts) == (num_tokens, count)
    assert found.mean == pytest.approx(mean, abs=1e-12)
    if mean > 1e-6:
        error = count / (count - 1) * math.fsum(r * r for r in residuals) / (mean * num_tokens) ** 2
        assert found.variance == pytest.approx(error * (1 + (12 / count) ** 2), rel=1e-6, abs=1e-6)


def test_few_prompts_few_tokens_and_updates_that_were_not_measured_give_no_verdict() -> None:
    assert mean_size([[1.0] * 30] * (LEAST_PROMPTS - 1)).evidence(BASE, 0.1) is None
    assert mean_size([[1.0] * 4] * 20).evidence(BASE, 0.1) is None
    assert FOREIGN.evidence(BASE, math.inf) is None
    assert FOREIGN.evidence(BASE, 0.1) == 0.5
    assert after(Alarm(), mean_size([[1.0] * 4] * 20)) == Alarm()


def test_older_tokens_raise_an_alarm_in_two_looks_and_end_it_in_two() -> None:
    alarm = after(Alarm(), FOREIGN)
    assert alarm.is_raised is False and alarm.evidence == 0.5
    alarm = after(alarm, FOREIGN)
    assert alarm.is_raised and alarm.evidence == 1.0 and alarm.num_tokens == 600
    alarm = after(alarm, FOREIGN)
    fine = mean_size([[1e-4] * 30] * 20)
    alarm = after(alarm, fine)
    assert alarm.is_raised and alarm.evidence == 0.5
    assert after(alarm, NONE) == alarm  # nothing was compared
    assert after(alarm, fine) == Alarm(False)


def test_one_token_of_the_trainers_version_raises_an_alarm_and_as_many_tokens_end_it() -> None:
    alarm = after(Alarm(), NONE, gap_of(90, 0.5))
    assert alarm.is_raised and alarm.num_tokens == 90
    for _ in range(2):
        alarm = after(alarm, NONE, gap_of(30))
        assert alarm.is_raised
    assert after(alarm, NONE, gap_of(30)) == Alarm(False)


def test_older_tokens_end_an_alarm_only_if_they_would_have_shown_it() -> None:
    alarm = after(Alarm(), NONE, gap_of(90, 0.05))
    fine = mean_size([[1e-3] * 30] * 20)
    assert after(after(alarm, fine, allowed=0.03), fine, allowed=0.03) == alarm
    assert after(after(alarm, fine, allowed=0.02), fine, allowed=0.02) == Alarm(False)


def steps(num_prompts: int, *, fault: float, seed: int, count: int) -> Iterator[float | None]:
    """The evidence of steps whose updates move prompts by amounts with heavy tails, as small trials do.

    Log-normal: an update by its prompts by its answers of 3 tokens; of the 8 answers of a prompt two are measured.

    Args:
        fault: times what was learned that the generator's numbers are apart.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        update = np.exp(rng.normal(-3.0, 0.7))
        sums = []
        for answers, factor in ((8, fault), (2, 1.0)):
            of_prompt = np.exp(rng.normal(0.0, 0.6, (num_prompts, 1, 1)))
            of_answer = np.exp(rng.normal(0.0, 0.5, (num_prompts, answers, 1)))
            differences = factor * update * of_prompt * of_answer * rng.normal(size=(num_prompts, answers, 3))
            prompts = np.repeat(np.arange(num_prompts), answers * 3)
            sums.append(MeanSize.of(MeanSize.sums(differences.ravel(), prompts)))
        yield sums[0].evidence(BASE + sums[1].mean, sums[1].variance)


@pytest.mark.parametrize("num_prompts", [8, 16, 32, 128])
def test_no_alarm_in_thousands_of_healthy_steps_whose_drift_has_heavy_tails(num_prompts: int) -> None:
    alarm, largest = Alarm(), 0.0
    for evidence in steps(num_prompts, fault=1.0, seed=num_prompts, count=2000):
        alarm = alarm.after(gap_of(0), threshold=EXACT, older=SOUND, allowed=1.0, evidence=evidence)
        largest = max(largest, alarm.evidence)
    assert alarm.is_raised is False and largest < 0.9


@pytest.mark.parametrize(("num_prompts", "fault"), [(32, 3.0), (32, 2.2), (128, 2.0)])
def test_differences_of_twice_the_drift_and_more_are_found_within_five_looks(num_prompts: int, fault: float) -> None:
    found = 0
    for seed in range(100):
        alarm = Alarm()
        for evidence in steps(num_prompts, fault=fault, seed=seed, count=5):
            alarm = alarm.after(gap_of(0), threshold=EXACT, older=SOUND, allowed=1.0, evidence=evidence)
        found += alarm.is_raised is True
    assert found >= 95
