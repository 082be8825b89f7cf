"""Losses, divergences and log-probabilities against slow float64 loops, values and gradients."""

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from corral.workers.algorithms.functional.kl import KLEstimator, approximate_kl
from corral.workers.algorithms.functional.losses import behaviour_weights, ppo_clip_loss, sft_loss, value_loss
from corral.workers.backends.token_scores import score_next_tokens

NUM_TOKENS = 200
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


def slow_ppo_token(
    logprob: float, center: float, advantage: float, *, eps: float, c_clip: float | None
) -> tuple[float, float]:
    """(loss, derivative by logprob) of one token, case by case as the papers state them."""
    ratio = math.exp(logprob - center)
    if advantage >= 0:
        return (-advantage * ratio, -advantage * ratio) if ratio <= 1 + eps else (-advantage * (1 + eps), 0.0)
    if ratio < 1 - eps:
        return -advantage * (1 - eps), 0.0
    if c_clip is not None and ratio > c_clip:
        return -advantage * c_clip, 0.0
    return -advantage * ratio, -advantage * ratio


def slow_ppo(
    t: Tokens, *, eps: float, c_clip: float | None, cap: float | None, is_decoupled: bool
) -> tuple[float, int, Floats]:
    loss, count, gradient = 0.0, 0, np.zeros(NUM_TOKENS)
    for i in range(NUM_TOKENS):
        if not t.mask[i]:
            continue
        weight = math.exp(t.proximal[i] - t.old[i]) if is_decoupled else 1.0
        if cap is not None and is_decoupled and weight > cap:
            continue
        center = t.proximal[i] if is_decoupled else t.old[i]
        value, derivative = slow_ppo_token(t.current[i], center, t.advantages[i], eps=eps, c_clip=c_clip)
        loss += weight * value
        gradient[i] = weight * derivative
        count += 1
    return loss, count, gradient


@pytest.mark.parametrize(
    ("eps", "c_clip", "cap", "is_decoupled"),
    list(product([0.2, 0.05], [None, 1.5, 3.0], [None], [False]))
    + list(product([0.2], [None, 2.0], [None, 1.5], [True])),
)
def test_ppo_loss_and_gradient_equal_the_slow_loop(
    eps: float, c_clip: float | None, cap: float | None, is_decoupled: bool
) -> None:
    t = Tokens()
    logprobs = torch.tensor(t.current, requires_grad=True)
    mask, weights = torch.tensor(t.mask), None
    if is_decoupled:
        weights, mask = behaviour_weights(torch.tensor(t.proximal), torch.tensor(t.old), mask, cap=cap)
    result = ppo_clip_loss(
        logprobs,
        proximal_logprobs=torch.tensor(t.proximal if is_decoupled else t.old),
        advantages=torch.tensor(t.advantages),
        loss_mask=mask,
        eps_clip=eps,
        c_clip=c_clip,
        token_weights=weights,
    )
    result.loss_sum.backward()  # type: ignore[no-untyped-call]
    loss, count, gradient = slow_ppo(t, eps=eps, c_clip=c_clip, cap=cap, is_decoupled=is_decoupled)
    assert float(result.loss_sum.detach()) == pytest.approx(loss, abs=1e-6)
    assert int(result.num_tokens) == count
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), gradient, atol=1e-6)


def test_the_cap_takes_tokens_out_of_the_denominator_too() -> None:
    mask = torch.tensor([True, True, True, False])
    weights, kept = behaviour_weights(torch.tensor([0.0, 2.0, 0.1, 9.0]), torch.zeros(4), mask, cap=5.0)
    assert kept.tolist() == [True, False, True, False]
    np.testing.assert_allclose(weights, [1.0, 0.0, math.exp(0.1), 0.0], rtol=1e-6)
    assert behaviour_weights(torch.tensor([2.0]), torch.zeros(1), torch.tensor([True]), cap=None)[1].tolist() == [True]


def test_ppo_statistics_count_what_the_clips_did() -> None:
    # ratio 2 with a positive advantage: clipped; ratio 4 with a negative one: dual-clipped; ratio 1: neither.
    result = ppo_clip_loss(
        torch.tensor([math.log(2.0), math.log(4.0), 0.0, 50.0]),
        proximal_logprobs=torch.zeros(4),
        advantages=torch.tensor([1.0, -1.0, 1.0, 1.0]),
        loss_mask=torch.tensor([True, True, True, False]),
        eps_clip=0.2,
        c_clip=3.0,
    )
    assert float(result.loss_sum.detach()) == pytest.approx(-1.2 + 3.0 - 1.0, abs=1e-6)
    assert (int(result.clipped_sum), int(result.dual_clipped_sum), int(result.num_tokens)) == (1, 1, 3)
    assert float(result.ratio_sum) == pytest.approx(7.0, abs=1e-5)
    assert float(result.approx_kl_sum) == pytest.approx(-math.log(8.0), abs=1e-6)


def test_what_stands_on_masked_tokens_reaches_neither_loss_nor_gradient() -> None:
    logprobs = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    result = ppo_clip_loss(
        logprobs,
        proximal_logprobs=torch.tensor([-1.0, 0.0, math.inf]),
        advantages=torch.tensor([2.0, math.nan, 1.0]),
        loss_mask=torch.tensor([True, False, False]),
        eps_clip=0.2,
    )
    result.loss_sum.backward()  # type: ignore[no-untyped-call]
    assert float(result.loss_sum.detach()) == -2.0
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-2.0, 0.0, 0.0]


def test_a_dual_clip_below_one_is_refused() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="must exceed 1"):
        ppo_clip_loss(
            zeros, proximal_logprobs=zeros, advantages=zeros, loss_mask=zeros.bool(), eps_clip=0.2, c_clip=0.5
        )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_equal_their_formulas(estimator: KLEstimator) -> None:
    t = Tokens(1)
    formula: dict[str, Callable[[float], float]] = {
        "k1": lambda r: -math.log(r),
        "k2": lambda r: math.log(r) ** 2 / 2,
        "k3": lambda r: r - 1 - math.log(r),
    }
    expected = [formula[estimator](math.exp(t.old[i] - t.current[i])) for i in range(NUM_TOKENS)]
    actual = approximate_kl(torch.tensor(t.current), torch.tensor(t.old), estimator=estimator)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_k1_and_k3_average_to_the_exact_divergence() -> None:
    rng = np.random.default_rng(2)
    policy = torch.tensor(rng.dirichlet(np.ones(8)))
    reference = torch.tensor(rng.dirichlet(np.ones(8)))
    exact = float((policy * (policy / reference).log()).sum())
    estimators: tuple[KLEstimator, ...] = ("k1", "k3")
    for estimator in estimators:
        estimate = approximate_kl(policy.log(), reference.log(), estimator=estimator)
        assert float((policy * estimate).sum()) == pytest.approx(exact, abs=1e-9)


def test_an_unknown_kl_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4'; choose k1, k2 or k3"):
        approximate_kl(torch.zeros(1), torch.zeros(1), estimator="k4")  # type: ignore[arg-type]


def test_value_loss_takes_the_larger_of_clipped_and_unclipped() -> None:
    rng = np.random.default_rng(3)
    values, old_values, returns = rng.normal(size=(3, NUM_TOKENS))
    mask = rng.random(NUM_TOKENS) < 0.5
    expected = 0.0
    for v, o, r in zip(values[mask], old_values[mask], returns[mask], strict=True):
        clipped = min(max(v, o - 0.2), o + 0.2)
        expected += 0.5 * max((v - r) ** 2, (clipped - r) ** 2)
    loss, count = value_loss(
        torch.tensor(values),
        old_values=torch.tensor(old_values),
        returns=torch.tensor(returns),
        loss_mask=torch.tensor(mask),
        value_eps_clip=0.2,
    )
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert int(count) == int(mask.sum())


def test_sft_loss_is_the_sum_of_negative_logprobs() -> None:
    loss, count = sft_loss(torch.tensor([-1.0, -2.0, -4.0]), loss_mask=torch.tensor([True, False, True]))
    assert (float(loss), int(count)) == (5.0, 2)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("chunk_tokens", [3, 1024])
def test_next_token_scores_equal_a_softmax_in_float64(temperature: float, chunk_tokens: int) -> None:
    rng = np.random.default_rng(4)
    raw, labels = 3 * rng.normal(size=(10, 7)), rng.integers(0, 7, size=10)
    weights = rng.normal(size=10)
    scale = 1.0 / temperature if temperature else 1.0
    logits = torch.tensor(raw, dtype=torch.float32, requires_grad=True)
    scores = score_next_tokens(logits, torch.tensor(labels), temperature=temperature, chunk_tokens=chunk_tokens)
    logprobs, entropy = scores.logprobs, scores.entropy
    (logprobs * torch.tensor(weights, dtype=torch.float32)).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    for t in range(10):
        exponentials = [math.exp(scale * x) for x in raw[t]]
        p = [e / math.fsum(exponentials) for e in exponentials]
        assert float(logprobs[t].detach()) == pytest.approx(math.log(p[labels[t]]), abs=1e-5)
        assert float(entropy[t]) == pytest.approx(-math.fsum(x * math.log(x) for x in p), abs=1e-5)
        slope = [weights[t] * scale * ((v == labels[t]) - p[v]) for v in range(7)]
        np.testing.assert_allclose(logits.grad[t], slope, atol=1e-5)


def test_a_forbidden_token_does_not_poison_the_entropy() -> None:
    scores = score_next_tokens(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]))
    assert float(scores.entropy[0]) == pytest.approx(math.log(2.0), abs=1e-6)
