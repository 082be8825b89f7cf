"""The gap between two sides' log-probabilities, beside a slow loop, and what its shape says of the cause."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.config.algorithm import LEAST_PROMPTS, PPOConfig
from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.worker_specs import BehaviourSpec
from corral.workers.algorithms.functional.logprob_gap import Alarm, ComparedTokens, Drift, LogprobGap, MeanSize
from corral.workers.algorithms.gap_watch import TwoSides, likely_causes

THRESHOLD = 0.01
Token = tuple[float, float, float]
"""Recorded, recomputed, entropy."""

tokens_of_answers = st.lists(
    st.lists(st.tuples(st.floats(-8.0, 0.0), st.floats(-8.0, 0.0), st.floats(0.0, 4.0)), min_size=1, max_size=5),
    max_size=5,
)


def compared(answers: list[list[Token]]) -> ComparedTokens:
    flat = np.array([token for answer in answers for token in answer], np.float64).reshape(-1, 3)
    number = [index for index, answer in enumerate(answers) for _ in answer]
    return ComparedTokens(
        recorded=flat[:, 0], recomputed=flat[:, 1], entropy=flat[:, 2], answer=np.array(number, np.int64)
    )


def gap_over_ranks(*ranks: list[list[Token]], threshold: float = THRESHOLD) -> LogprobGap:
    parts = [compared(answers) for answers in ranks]
    sums, maxima = zip(*(part.totals(threshold=threshold) for part in parts), strict=True)
    return LogprobGap.of(
        {name: sum(one[name] for one in sums) for name in sums[0]},
        {name: max(one[name] for one in maxima) for name in maxima[0]},
    )


@given(tokens_of_answers, st.integers(0, 5))
def test_the_gap_is_that_of_a_slow_loop_however_answers_are_spread_over_ranks(
    answers: list[list[Token]], cut: int
) -> None:
    gap = gap_over_ranks(answers[:cut], answers[cut:])
    differences = [[recorded - recomputed for recorded, recomputed, _ in answer] for answer in answers]
    every = [difference for answer in differences for difference in answer]
    beyond = [[abs(difference) > THRESHOLD for difference in answer] for answer in differences]
    assert gap.num_tokens == len(every) and gap.num_answers == len(answers)
    assert gap.num_unequal == sum(difference != 0.0 for difference in every)
    assert gap.largest == max((abs(difference) for difference in every), default=0.0)
    assert gap.most_negative == max([0.0, *(-difference for difference in every)])
    assert gap.num_answers_beyond == sum(map(any, beyond))
    if every:
        assert gap.mean == pytest.approx(sum(map(abs, every)) / len(every), abs=1e-12)
        assert gap.kl == pytest.approx(sum(math.exp(-d) - 1.0 + d for d in every) / len(every), abs=1e-9)
    assert -1e-9 <= gap.explained_by_temperature <= 1.0 + 1e-9


def sampled(
    num_tokens: int, *, temperature: float, logits_of_generator: Any = lambda logits: logits
) -> list[list[Token]]:
    """Answers of 20 tokens from random logits, where the trainer computes at temperature 0.8."""
    rng = np.random.default_rng(0)
    tokens = []
    for _ in range(num_tokens):
        logits = rng.normal(size=50) * 2.0
        theirs = log_softmax(logits_of_generator(logits) / temperature)
        ours = log_softmax(logits / 0.8)
        token = rng.choice(50, p=np.exp(theirs))
        tokens.append((float(theirs[token]), float(ours[token]), float(-(np.exp(ours) * ours).sum())))
    return [tokens[start : start + 20] for start in range(0, num_tokens, 20)]


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize("temperature", [0.6, 0.75, 0.9, 1.0])
def test_another_temperature_is_recognised_and_told(temperature: float) -> None:
    gap = gap_over_ranks(sampled(1000, temperature=temperature))
    assert gap.explained_by_temperature > 0.9
    assert 0.8 / gap.temperature_ratio == pytest.approx(temperature, rel=0.05)


def test_noise_and_other_weights_are_not_taken_for_a_temperature() -> None:
    rng = np.random.default_rng(1)
    for size in (0.01, 1.0):
        gap = gap_over_ranks(
            sampled(1000, temperature=0.8, logits_of_generator=lambda logits, s=size: logits + rng.normal(size=50) * s)
        )
        assert gap.explained_by_temperature < 0.2


def sides(
    *,
    dtype: str = "float32",
    decoupled: bool = True,
    rounded_by: tuple[str, ...] = (),
    keeps_cache: bool = False,
    keeps_experts: bool = False,
    routes_anew: bool = False,
    **sampling: Any,
) -> TwoSides:
    sampled_by = SamplingConfig(temperature=0.8, **sampling)
    behaviour = BehaviourSpec(
        sampling=sampled_by,
        rounded_by=rounded_by,
        keeps_cache=keeps_cache,
        keeps_experts=keeps_experts,
        routes_anew=routes_anew,
    )
    return TwoSides(behaviour=behaviour, dtype=dtype, ppo=PPOConfig(use_decoupled_loss=decoupled))


def causes(answers: list[list[Token]], setup: TwoSides, *, agreed_until: int | None = None) -> str:
    return "\n".join(likely_causes(gap_over_ranks(answers), setup, version=7, agreed_until=agreed_until))


def shifted(answers: list[list[Token]], by: float, *, chosen: Any = lambda answer, token: True) -> list[list[Token]]:
    """The trainer's own numbers as the generator's, but for the tokens chosen, whose signs take turns."""
    return [
        [
            (recomputed + (by * (-1) ** token if chosen(answer, token) else 0.0), recomputed, entropy)
            for token, (_, recomputed, entropy) in enumerate(tokens)
        ]
        for answer, tokens in enumerate(answers)
    ]


def test_each_cause_is_named_by_what_was_measured_and_configured() -> None:
    fine = sampled(200, temperature=0.8)
    assert "as rounding does" in causes(shifted(fine, 0.02), sides())
    assert "trainer in bfloat16" in causes(shifted(fine, 0.02), sides(dtype="bfloat16"))
    rounded = causes(shifted(fine, 0.02), sides(rounded_by=("engine.quantization",)))
    assert rounded == "arithmetic: the generator's weights are rounded (engine.quantization)"
    kept = causes(shifted(fine, 0.02), sides(keeps_cache=True))
    assert kept == "weights.update_mode: answers under way keep the keys and values of older weights (in_place)"
    older = causes(shifted(fine, 0.02), sides(keeps_experts=True))
    assert older.startswith("experts: answers that newer weights continue keep those") and "\n" not in older
    anew = causes(shifted(fine, 0.02), sides(dtype="bfloat16", routes_anew=True))
    assert anew.startswith("experts: the trainer chooses those of each token anew")
    assert "about 0.75, the trainer computes with rollout.sampling.temperature 0.8" in causes(
        sampled(1000, temperature=0.75), sides()
    )
    assert "other weights than version 7" in causes(shifted(fine, 2.0), sides())
    assert "agreed until version 6" in causes(shifted(fine, 2.0), sides(), agreed_until=6)
    assert "other weights" not in causes(shifted(fine, 2.0), sides(), agreed_until=6)


def test_a_truncated_distribution_is_recognised_where_one_is_sampled_from() -> None:
    renormalised = [[(r - math.log(0.9), r, h) for r, _, h in answer] for answer in sampled(200, temperature=0.8)]
    assert "top_p 0.9" in causes(renormalised, sides(top_p=0.9))
    assert "top_p" not in causes(renormalised, sides())
    assert "top_p" not in causes(shifted(renormalised, 0.02), sides(top_p=0.9))


def test_differences_of_some_answers_say_where_to_look() -> None:
    fine = sampled(200, temperature=0.8)
    only_some = causes(shifted(fine, 2.0, chosen=lambda answer, token: answer < 3), sides())
    assert "in 3 of 10 answers only" in only_some


def test_an_alarm_says_whether_anything_corrects_for_the_difference() -> None:
    fine = sampled(200, temperature=0.8)
    assert "counts as learning" in causes(shifted(fine, 0.02), sides(decoupled=False))
    assert "counts as learning" not in causes(shifted(fine, 0.02), sides())


def test_the_threshold_is_that_of_the_coarser_side_unless_it_is_set() -> None:
    assert sides().threshold == 1e-3
    assert sides(dtype="bfloat16").threshold == sides(rounded_by=("engine.quantization",)).threshold == 0.5
    assert sides(keeps_cache=True).threshold == sides(keeps_experts=True).threshold == 0.5
    set_to = TwoSides(behaviour=BehaviourSpec(), dtype="bfloat16", ppo=PPOConfig(gap_alarm=0.02))
    assert set_to.threshold == 0.02


# --- what updates have moved, and when an alarm begins and ends -----------------------------------------------------

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
