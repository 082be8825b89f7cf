"""The gap between two sides' log-probabilities, beside a slow loop, and what its shape says of the cause."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.worker_specs import BehaviourSpec
from corral.workers.algorithms.functional.logprob_gap import ComparedTokens, LogprobGap
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
