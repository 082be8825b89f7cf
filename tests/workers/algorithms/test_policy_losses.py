"""Policy losses against slow float64 loops, values and gradients."""

import math
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from corral.experiments.config.algorithm import PPOConfig
from corral.workers.algorithms.functional.losses import TokenLosses, bradley_terry_loss, dpo_loss, sft_loss, value_loss
from corral.workers.algorithms.functional.policy_losses import (
    behaviour_weights,
    cispo,
    gspo,
    ppo_clip,
)
from corral.workers.algorithms.policy_loss import Luffy, SelfImitation, SFTMix
from corral.workers.backends.base import TokenScores
from corral.workers.backends.micro_batches import MicroBatch

NUM_TOKENS = 200
LENGTHS = [1, 40, 0, 7, 100, 52]
Floats = npt.NDArray[np.float64]


class Tokens:
    """Random tokens whose ratios reach well beyond every clip."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.old: Floats = -rng.exponential(size=NUM_TOKENS)
        self.proximal: Floats = self.old + 0.8 * rng.normal(size=NUM_TOKENS)
        self.current: Floats = self.proximal + 0.8 * rng.normal(size=NUM_TOKENS)
        self.advantages: Floats = rng.normal(size=NUM_TOKENS)
        self.mask: npt.NDArray[np.bool_] = rng.random(NUM_TOKENS) < 0.7


def summed(losses: TokenLosses, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    return torch.where(mask, losses.losses if weights is None else losses.losses * weights, 0.0).sum()


def slow_ppo_token(
    logprob: float, center: float, advantage: float, *, low: float, high: float, c_clip: float | None
) -> tuple[float, float]:
    """(loss, derivative by logprob) of one token, case by case as the papers state them."""
    ratio = math.exp(logprob - center)
    if advantage >= 0:
        return (-advantage * ratio, -advantage * ratio) if ratio <= 1 + high else (-advantage * (1 + high), 0.0)
    if ratio < 1 - low:
        return -advantage * (1 - low), 0.0
    if c_clip is not None and ratio > c_clip:
        return -advantage * c_clip, 0.0
    return -advantage * ratio, -advantage * ratio


def slow_ppo(
    t: Tokens, *, low: float, high: float, c_clip: float | None, cap: float | None, is_decoupled: bool, truncates: bool
) -> tuple[float, int, Floats]:
    loss, count, gradient = 0.0, 0, np.zeros(NUM_TOKENS)
    for i in range(NUM_TOKENS):
        if not t.mask[i]:
            continue
        weight = math.exp(t.proximal[i] - t.old[i]) if is_decoupled else 1.0
        if cap is not None and is_decoupled and weight > cap:
            if not truncates:
                continue
            weight = cap
        center = t.proximal[i] if is_decoupled else t.old[i]
        value, derivative = slow_ppo_token(t.current[i], center, t.advantages[i], low=low, high=high, c_clip=c_clip)
        loss += weight * value
        gradient[i] = weight * derivative
        count += 1
    return loss, count, gradient


@pytest.mark.parametrize(
    ("low", "high", "c_clip", "cap", "is_decoupled", "truncates"),
    [
        *((low, None, c_clip, None, False, False) for low, c_clip in product([0.2, 0.05], [None, 1.5, 3.0])),
        (0.2, 0.28, None, None, False, False),
        (0.2, 0.28, 1.5, None, False, False),
        *((0.2, None, c_clip, cap, True, False) for c_clip, cap in product([None, 2.0], [None, 1.5])),
        (0.2, 0.28, None, 1.5, True, True),
    ],
)
def test_ppo_loss_and_gradient_equal_the_slow_loop(
    low: float, high: float | None, c_clip: float | None, cap: float | None, is_decoupled: bool, truncates: bool
) -> None:
    t = Tokens()
    logprobs = torch.tensor(t.current, requires_grad=True)
    mask, weights = torch.tensor(t.mask), None
    if is_decoupled:
        weights, mask = behaviour_weights(
            torch.tensor(t.proximal), torch.tensor(t.old), mask, cap=cap, truncates=truncates
        )
    result = ppo_clip(
        logprobs,
        center_logprobs=torch.tensor(t.proximal if is_decoupled else t.old),
        advantages=torch.tensor(t.advantages),
        loss_mask=mask,
        eps_clip=low,
        eps_clip_high=high,
        c_clip=c_clip,
    )
    loss_sum = summed(result, mask, weights)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    loss, count, gradient = slow_ppo(
        t, low=low, high=high or low, c_clip=c_clip, cap=cap, is_decoupled=is_decoupled, truncates=truncates
    )
    assert float(loss_sum.detach()) == pytest.approx(loss, abs=1e-6)
    assert int(mask.sum()) == count
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), gradient, atol=1e-6)


def test_ppo_statistics_count_what_the_clips_did() -> None:
    # ratio 2 with a positive advantage: clipped; ratio 4 with a negative one: dual-clipped; ratio 1: neither.
    result = ppo_clip(
        torch.tensor([math.log(2.0), math.log(4.0), 0.0, 50.0]),
        center_logprobs=torch.zeros(4),
        advantages=torch.tensor([1.0, -1.0, 1.0, 1.0]),
        loss_mask=torch.tensor([True, True, True, False]),
        eps_clip=0.2,
        c_clip=3.0,
    )
    np.testing.assert_allclose(result.losses[:3], [-1.2, 3.0, -1.0], atol=1e-6)
    assert result.stats["ppo/clip_fraction"][:3].tolist() == [True, False, False]
    assert result.stats["ppo/dual_clip_fraction"][:3].tolist() == [False, True, False]


@pytest.mark.parametrize("loss", [ppo_clip, gspo, cispo])
def test_what_stands_on_masked_tokens_reaches_no_gradient(loss: Any) -> None:
    logprobs = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    mask = torch.tensor([True, False, False])
    settings: dict[str, Any] = {"answer_lengths": [2, 1]} if loss is gspo else {}
    result = loss(
        torch.where(mask, logprobs, 0.0),  # as every policy loss is called
        center_logprobs=torch.tensor([-1.0, 0.0, math.inf]),
        advantages=torch.tensor([2.0, math.nan, 1.0]),
        loss_mask=mask,
        eps_clip=0.2,
        **settings,
    )
    loss_sum = summed(result, mask)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(float(loss_sum.detach()))
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-2.0, 0.0, 0.0]


def test_a_dual_clip_below_one_is_refused() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="must exceed 1"):
        ppo_clip(zeros, center_logprobs=zeros, advantages=zeros, loss_mask=zeros.bool(), eps_clip=0.2, c_clip=0.5)


def slow_gspo(t: Tokens, advantage_by_answer: Floats, *, low: float, high: float) -> tuple[float, Floats]:
    """(mean over answers, gradient) of equation 5: one clipped ratio per answer, differentiated by hand."""
    loss, gradient, start = 0.0, np.zeros(NUM_TOKENS), 0
    for length, advantage in zip(LENGTHS, advantage_by_answer, strict=True):
        tokens = [i for i in range(start, start + length) if t.mask[i]]
        start += length
        if not tokens:
            continue
        ratio = math.exp(math.fsum(t.current[i] - t.proximal[i] for i in tokens) / len(tokens))
        clipped = min(max(ratio, 1 - low), 1 + high)
        loss += max(-advantage * ratio, -advantage * clipped)
        if -advantage * ratio >= -advantage * clipped:
            gradient[tokens] = -advantage * ratio / len(tokens)
    return loss, gradient


def test_gspo_clips_whole_answers_by_the_geometric_mean_of_their_ratios() -> None:
    t = Tokens(3)
    advantages = np.array([1.0, -0.5, 2.0, 1.5, -1.0, 0.7])
    mask = torch.tensor(t.mask)
    logprobs = torch.tensor(t.current, requires_grad=True)
    result = gspo(
        logprobs,
        center_logprobs=torch.tensor(t.proximal),
        advantages=torch.tensor(np.repeat(advantages, LENGTHS)),
        loss_mask=mask,
        answer_lengths=LENGTHS,
        eps_clip=0.01,
        eps_clip_high=0.02,
    )
    index = torch.tensor(np.repeat(np.arange(len(LENGTHS)), LENGTHS))
    tokens_in_answer = torch.bincount(index, weights=mask.double(), minlength=len(LENGTHS))
    loss_sum = summed(result, mask, 1.0 / tokens_in_answer[index].clamp(min=1.0))
    loss_sum.backward()  # type: ignore[no-untyped-call]
    loss, gradient = slow_gspo(t, advantages, low=0.01, high=0.02)
    assert 0.0 < float(result.stats["ppo/clip_fraction"][mask].double().mean()) < 1.0
    assert float(loss_sum.detach()) == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad, gradient, atol=1e-6)


@pytest.mark.parametrize(("low", "high"), [(0.2, None), (1.0, 0.5)])
def test_cispo_clips_the_weight_and_never_the_gradient(low: float, high: float | None) -> None:
    t = Tokens(5)
    mask, logprobs = torch.tensor(t.mask), torch.tensor(t.current, requires_grad=True)
    result = cispo(
        logprobs,
        center_logprobs=torch.tensor(t.old),
        advantages=torch.tensor(t.advantages),
        loss_mask=mask,
        eps_clip=low,
        eps_clip_high=high,
    )
    loss_sum = summed(result, mask)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    loss, gradient = 0.0, np.zeros(NUM_TOKENS)
    for i in range(NUM_TOKENS):
        if t.mask[i]:
            weight = min(max(math.exp(t.current[i] - t.old[i]), 1 - low), 1 + (high or low))
            loss -= weight * t.advantages[i] * t.current[i]
            gradient[i] = -weight * t.advantages[i]
    assert float(loss_sum.detach()) == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad, gradient, atol=1e-6)


def test_self_imitation_adds_what_came_out_better_whatever_the_clip_says() -> None:
    t, mask = Tokens(), torch.ones(NUM_TOKENS, dtype=torch.bool)
    logprobs = torch.tensor(t.current, requires_grad=True)
    keys = {"advantages": torch.tensor(t.advantages), "old_logprobs": torch.tensor(t.old), "loss_mask": mask}
    scores, batch = TokenScores(logprobs, torch.zeros(NUM_TOKENS)), cast(MicroBatch, SimpleNamespace(tensors=keys))
    made = SelfImitation(coef=0.3)(scores, batch, PPOConfig(use_decoupled_loss=False))
    made.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    for i in range(NUM_TOKENS):
        loss, slope = slow_ppo_token(t.current[i], t.old[i], t.advantages[i], low=0.2, high=0.2, c_clip=None)
        better = max(t.advantages[i], 0.0)
        assert float(made.losses.detach()[i]) == pytest.approx(loss - 0.3 * better * t.current[i], abs=1e-9)
        assert float(logprobs.grad[i]) == pytest.approx(slope - 0.3 * better, abs=1e-9)
    assert made.stats["self_imitation/fraction"].tolist() == (t.advantages > 0).tolist()
    with pytest.raises(ValueError, match="set ppo.use_decoupled_loss: false"):
        SelfImitation()(scores, batch, PPOConfig())


@pytest.mark.parametrize("loss", [Luffy(gamma=0.2), SFTMix(coef=0.3)], ids=["luffy", "sft_mix"])
def test_what_was_shown_is_learned_by_a_loss_of_its_own(loss: Luffy | SFTMix) -> None:
    t = Tokens()
    is_shown = np.arange(NUM_TOKENS) % 3 == 0
    logprobs = torch.tensor(np.where(is_shown, np.minimum(t.current, 0.0), t.current), requires_grad=True)
    keys = {
        "advantages": torch.tensor(t.advantages),
        "old_logprobs": torch.tensor(np.where(is_shown, 0.0, t.old)),
        "loss_mask": torch.ones(NUM_TOKENS, dtype=torch.bool),
        "versions": torch.tensor(np.where(is_shown, -1, 3)),
    }
    scores, batch = TokenScores(logprobs, torch.zeros(NUM_TOKENS)), cast(MicroBatch, SimpleNamespace(tensors=keys))
    made = loss(scores, batch, PPOConfig(use_decoupled_loss=False))
    made.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    for i in range(NUM_TOKENS):
        logprob, advantage = float(logprobs.detach()[i]), t.advantages[i]
        value, slope = slow_ppo_token(logprob, t.old[i], advantage, low=0.2, high=0.2, c_clip=None)
        if is_shown[i] and isinstance(loss, Luffy):
            p = math.exp(logprob)
            value, slope = -advantage * p / (p + 0.2), -advantage * 0.2 * p / (p + 0.2) ** 2
        elif is_shown[i]:
            value, slope = -0.3 * logprob, -0.3
        assert float(made.losses.detach()[i]) == pytest.approx(value, abs=1e-9)
        assert float(logprobs.grad[i]) == pytest.approx(slope, abs=1e-9)
    assert (
        made.stats[f"{'luffy' if isinstance(loss, Luffy) else 'sft_mix'}/shown_fraction"].tolist() == is_shown.tolist()
    )
    with pytest.raises(ValueError, match="set ppo.use_decoupled_loss: false"):
        loss(scores, batch, PPOConfig())


BOUNDS = {"token": (0.6, 1.5), "sequence": (0.01, 100.0), "geometric": (0.9, 1.05)}
"""Between which some weights are, and some are not."""


def slow_weights(t: Tokens, *, cap: float, floor: float, truncates: bool, level: str) -> tuple[Floats, list[bool]]:
    """Answer by answer, token by token."""
    weights, kept, start = np.zeros(NUM_TOKENS), [False] * NUM_TOKENS, 0
    for length in LENGTHS:
        places = [i for i in range(start, start + length) if t.mask[i]]
        start += length
        ratios = {i: math.exp(t.proximal[i] - t.old[i]) for i in places}
        for i in places:
            if level == "sequence":
                weight = math.exp(min(20.0, max(-20.0, sum(math.log(ratios[j]) for j in places))))
            elif level == "geometric":
                weight = math.prod(ratios.values()) ** (1.0 / len(places))
            else:
                weight = ratios[i]
            kept[i] = truncates or floor <= weight <= cap
            weights[i] = min(max(weight, floor), cap) if kept[i] else 0.0
    return weights, kept


@pytest.mark.parametrize(("level", "truncates"), list(product(BOUNDS, [False, True])))
def test_weights_by_token_and_by_answer_equal_the_slow_loop(level: Any, truncates: bool) -> None:
    t, (floor, cap) = Tokens(), BOUNDS[level]
    weights, kept = behaviour_weights(
        torch.tensor(t.proximal),
        torch.tensor(t.old),
        torch.tensor(t.mask),
        cap=cap,
        floor=floor,
        truncates=truncates,
        level=level,
        answer_lengths=LENGTHS,
    )
    expected, expected_kept = slow_weights(t, cap=cap, floor=floor, truncates=truncates, level=level)
    assert kept.tolist() == expected_kept
    assert truncates or 0 < sum(expected_kept) < t.mask.sum()
    np.testing.assert_allclose(weights, expected, atol=1e-9)


# --- critics, reward models, preferences and language models --------------------------------------------------------

NUM = 200


def gradient_of(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    point = at.clone().requires_grad_()
    function(point).sum().backward()  # type: ignore[no-untyped-call]
    assert point.grad is not None
    return point.grad


def slope(function: Callable[[float], float], at: float) -> float:
    return (function(at + 1e-6) - function(at - 1e-6)) / 2e-6


@pytest.mark.parametrize("value_eps_clip", [None, 0.2])
def test_value_loss_takes_the_larger_of_clipped_and_unclipped(value_eps_clip: float | None) -> None:
    values, old_values, returns = np.random.default_rng(3).normal(size=(3, NUM))

    def slow(value: float, i: int) -> float:
        def error(distance: float) -> float:
            return distance**2 / 2

        if value_eps_clip is None:
            return error(value - returns[i])
        near_old = min(max(value, old_values[i] - value_eps_clip), old_values[i] + value_eps_clip)
        return max(error(value - returns[i]), error(near_old - returns[i]))

    def fast(at: Tensor) -> Tensor:
        return value_loss(
            at,
            old_values=torch.tensor(old_values),
            returns=torch.tensor(returns),
            value_eps_clip=value_eps_clip,
        ).losses

    at = torch.tensor(values)
    np.testing.assert_allclose(fast(at), [slow(values[i], i) for i in range(NUM)], atol=1e-9)
    slopes = [slope(lambda x, i=i: slow(x, i), values[i]) for i in range(NUM)]  # type: ignore[misc]
    np.testing.assert_allclose(gradient_of(fast, at), slopes, atol=1e-5)


def test_value_loss_says_which_values_the_clip_decided() -> None:
    # old value 0, return 1: at 0.5 the clipped value 0.2 is further off; at 0.1 the clip does not act.
    result = value_loss(torch.tensor([0.5, 0.1]), old_values=torch.zeros(2), returns=torch.ones(2), value_eps_clip=0.2)
    assert result.stats["critic/clip_fraction"].tolist() == [True, False]


def test_sft_loss_is_the_negative_logprob() -> None:
    assert sft_loss(torch.tensor([-1.0, -4.0])).losses.tolist() == [1.0, 4.0]


def test_the_bradley_terry_loss_is_the_surprise_at_the_winner() -> None:
    chosen, rejected = np.random.default_rng(5).normal(size=(2, NUM)) * 3
    surprise = [-math.log(math.exp(c) / (math.exp(c) + math.exp(r))) for c, r in zip(chosen, rejected, strict=True)]
    np.testing.assert_allclose(bradley_terry_loss(torch.tensor(chosen), torch.tensor(rejected)), surprise, atol=1e-9)
    pushed = gradient_of(lambda at: bradley_terry_loss(at, torch.tensor(rejected)), torch.tensor(chosen))
    loses = [math.exp(r) / (math.exp(c) + math.exp(r)) for c, r in zip(chosen, rejected, strict=True)]
    np.testing.assert_allclose(pushed, [-p for p in loses], atol=1e-9)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_dpo_loss_is_the_likelihood_of_the_preference_under_the_implicit_rewards(label_smoothing: float) -> None:
    policy_chosen, policy_rejected, ref_chosen, ref_rejected = np.random.default_rng(6).normal(size=(4, NUM)) * 4
    beta = 0.3
    expected = []
    for i in range(NUM):
        winner = math.exp(beta * (policy_chosen[i] - ref_chosen[i]))
        loser = math.exp(beta * (policy_rejected[i] - ref_rejected[i]))
        wins = winner / (winner + loser)
        expected.append(-(1 - label_smoothing) * math.log(wins) - label_smoothing * math.log(1 - wins))
    margins = torch.tensor(beta * ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)))
    np.testing.assert_allclose(dpo_loss(margins, label_smoothing=label_smoothing), expected, atol=1e-9)


@pytest.mark.parametrize("margin", [math.inf, -math.inf, math.nan])
def test_a_margin_that_is_not_finite_has_no_finite_loss(margin: float) -> None:
    assert not math.isfinite(float(dpo_loss(torch.tensor(margin))))
