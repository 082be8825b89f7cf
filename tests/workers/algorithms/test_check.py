"""The command that checks a loss of one's own: it passes what ships, and names what is wrong elsewhere."""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.base import FrozenConfig
from corral.workers.algorithms.advantage import ADVANTAGES, AdvantageBatch, AdvantageEstimator
from corral.workers.algorithms.check import check_advantage, check_loss, main
from corral.workers.algorithms.functional.losses import TokenLosses
from corral.workers.algorithms.functional.packed import mean_per_answer, per_token
from corral.workers.algorithms.functional.policy_losses import importance_ratio
from corral.workers.algorithms.policy_loss import LOSSES, PolicyLoss, center_logprobs
from corral.workers.backends.base import TokenScores
from corral.workers.backends.micro_batches import MicroBatch

CONFIG = PPOConfig(eps_clip=0.2)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_that_ship_are_as_they_should_be(name: str, decoupled: bool) -> None:
    assert list(check_loss(LOSSES[name], PPOConfig(loss=name, use_decoupled_loss=decoupled))) == []


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"gae", "none"}))
def test_the_advantages_that_ship_are_as_they_should_be(name: str) -> None:
    assert list(check_advantage(ADVANTAGES[name], PPOConfig.model_validate({"advantage": name}))) == []


def parts(scores: TokenScores, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """(ratio, advantages, loss mask, lengths) of a right loss: -advantage * ratio."""
    keys = micro_batch.tensors
    ratio, _ = importance_ratio(scores.logprobs, center_logprobs(micro_batch, CONFIG), keys["loss_mask"])
    return ratio, keys["advantages"], keys["loss_mask"], [length - 1 for length in micro_batch.segment_lengths]


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ratio: Tensor) -> Tensor:
        return ratio.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2.0 * gradients[0]


class _Remembering:
    """Subtracts a running mean of the losses of earlier calls."""

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
        ratio, advantages, mask, _ = parts(scores, micro_batch)
        self.mean = 0.9 * self.mean + 0.1
        return TokenLosses(-(advantages + self.mean) * ratio)


def wrong(compute: Callable[..., Tensor]) -> Callable[..., TokenLosses]:
    def loss(scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
        return TokenLosses(compute(scores, micro_batch, *parts(scores, micro_batch)))

    return loss


def normalised(s: Any, b: Any, ratio: Tensor, advantages: Tensor, mask: Tensor, lengths: Any) -> Tensor:
    seen = advantages[mask]
    return -(advantages - seen.mean()) / (seen.std() + 1e-3) * ratio


def changed_in_place(s: Any, b: Any, ratio: Tensor, advantages: Tensor, mask: Tensor, lengths: Any) -> Tensor:
    advantages.clamp_(min=0.0)
    return -advantages * ratio


def with_prompt_in_the_mean(s: Any, b: Any, ratio: Tensor, advantages: Tensor, mask: Tensor, lengths: Any) -> Tensor:
    log_ratio = s.logprobs - b.tensors["proximal_logprobs"]  # the prompt's, too
    return -advantages * per_token(mean_per_answer(log_ratio, torch.ones_like(mask), lengths), lengths).exp()


def graph_in_stats(scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
    ratio, advantages, _, _ = parts(scores, micro_batch)
    return TokenLosses(-advantages * ratio, {"mine/ratio": ratio})


WRONG: Mapping[str, tuple[Callable[..., TokenLosses], str]] = {
    "sign": (wrong(lambda s, b, r, a, m, n: a * r), "is a minus sign missing"),
    "divided by the micro-batch": (wrong(lambda s, b, r, a, m, n: -a * r / m.sum()), "depends on the others"),
    "normalised in the micro-batch": (wrong(normalised), "depends on the others in its micro-batch"),
    "one number": (wrong(lambda s, b, r, a, m, n: (-a * r).mean()), r"has the shape \[\], and not one number"),
    "no gradient": (wrong(lambda s, b, r, a, m, n: -a * r.detach()), "has no gradient"),
    "half of a product": (
        wrong(lambda s, b, r, a, m, n: -a * r * torch.as_tensor(r.tolist())),
        "its gradient is not that of its value",
    ),
    "wrong backward": (
        wrong(lambda s, b, r, a, m, n: -a * _WrongBackward.apply(r)),  # type: ignore[no-untyped-call]
        "its gradient is not that of its value",
    ),
    "in place": (wrong(changed_in_place), "changes advantages in place"),
    "a state": (_Remembering(), "its gradient is not|gives something else"),
    "prompt tokens in a mean": (wrong(with_prompt_in_the_mean), "numbers outside loss_mask change"),
    "divides by an advantage": (wrong(lambda s, b, r, a, m, n: -a.square() / a * r), "is not finite"),
    "the first answer's": (
        wrong(lambda s, b, r, a, m, n: -(a - a[0]) * r),
        "the order of the answers in a micro-batch changes",
    ),
    "overflow": (
        wrong(lambda s, b, r, a, m, n: -a * torch.exp(3.0 * (s.logprobs - b.tensors["proximal_logprobs"]))),
        "not finite where trainer and generator are 40 nats apart",
    ),
    "graph in statistics": (graph_in_stats, "statistics with a gradient .* mine/ratio"),
    "a plain tensor": (lambda s, b, c: s.logprobs, "returns a Tensor, and not TokenLosses"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_and_named(name: str) -> None:
    loss, words = WRONG[name]
    problems = list(check_loss(PolicyLoss(loss), CONFIG))
    assert any(re.search(words, problem) for problem in problems), problems


def test_what_leaves_out_a_minus_or_a_group_is_no_advantage() -> None:
    def backwards(batch: AdvantageBatch, config: PPOConfig) -> dict[str, Tensor]:
        return {"advantages": -batch.per_episode_to_tokens(batch.episode_rewards)}

    def over_the_rank(batch: AdvantageBatch, config: PPOConfig) -> dict[str, Tensor]:
        rewards = batch.episode_rewards
        return {"advantages": batch.per_episode_to_tokens(rewards - rewards.mean())}

    def by_the_deviation(batch: AdvantageBatch, config: PPOConfig) -> dict[str, Tensor]:
        groups = torch.split(batch.episode_rewards, list(batch.episodes_per_group))
        return {"advantages": batch.per_episode_to_tokens(torch.cat([(g - g.mean()) / g.std() for g in groups]))}

    for function, words in (
        (backwards, "no larger advantage"),
        (over_the_rank, "depend on the other prompts of its rank"),
        (by_the_deviation, "not finite; one group has equal rewards"),
    ):
        assert words in " ".join(check_advantage(AdvantageEstimator(function), CONFIG))


class Gentle(FrozenConfig):
    """A loss with a field of its own."""

    worse: float = 0.5
    inputs: ClassVar[tuple[Any, ...]] = ()

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
        ratio, advantages, _, _ = parts(scores, micro_batch)
        return TokenLosses(-torch.where(advantages < 0, self.worse, 1.0) * advantages * ratio)


def test_the_command_says_what_is_wrong_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{__name__}:Gentle", "loss_settings.worse=0.3"]) == 0
    assert main([f"{__name__}:Gentle", "loss_settings.worse=-9.0"]) == 1
    assert main([f"{__name__}:graph_in_stats"]) == 1
    assert "mine/ratio" in capsys.readouterr().out
    assert main([f"{__name__}:Gentle", "loss_settings.better=1.0"]) == 2
    assert main([f"{__name__}:graph_in_stats", "loss_settings.worse=1.0"]) == 2
    told = capsys.readouterr().err
    assert "unknown key 'better' (known keys: worse)" in told
    assert "no class with fields; make it a FrozenConfig" in told
