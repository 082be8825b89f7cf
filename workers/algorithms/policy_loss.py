"""Policy losses: plain functions from scores and a micro-batch to a loss per token, and the keys they declare.

    TokenScores, MicroBatch ──loss(scores, micro_batch, config)──► TokenLosses                    ppo gspo cispo

The actor does the rest for every loss alike: it masks, weighs by behaviour and by answer, adds the KL term, and sums.
One of the user's own is a function of the same form, named by its import path; if it reads keys that are not built in,
it is wrapped: `mine = PolicyLoss(_mine, inputs=(Key(...),))`. One with settings is a configuration class, whose fields
they are and whose instances are called; its keys are its ClassVar `inputs`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.base import FrozenConfig
from corral.scheduling.keys import Key, built_in
from corral.workers.algorithms.functional import policy_losses
from corral.workers.algorithms.functional.losses import TokenLosses
from corral.workers.backends.base import TokenScores
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.user_code.loading import built_in_or_loaded, configured

LossFunction = Callable[[TokenScores, MicroBatch, PPOConfig], TokenLosses]
"""Log-probabilities are 0 outside the loss mask, so that no gradient comes from there."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A function and the keys that it reads besides those of every actor."""

    function: LossFunction
    inputs: tuple[Key, ...] = ()

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
        return self.function(scores, micro_batch, config)


def center_logprobs(micro_batch: MicroBatch, config: PPOConfig) -> Tensor:
    """[T] of the policy that ratios are taken to."""
    return micro_batch.tensors["proximal_logprobs" if config.use_decoupled_loss else "old_logprobs"]


def _read(micro_batch: MicroBatch, config: PPOConfig) -> dict[str, Any]:
    """The inputs of every built-in loss besides the scores."""
    return {
        "center_logprobs": center_logprobs(micro_batch, config),
        "advantages": micro_batch.tensors["advantages"],
        "loss_mask": micro_batch.tensors["loss_mask"],
        "eps_clip": config.eps_clip,
        "eps_clip_high": config.eps_clip_high,
    }


def ppo(scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
    """Clipped per token."""
    return policy_losses.ppo_clip(scores.logprobs, c_clip=config.c_clip, **_read(micro_batch, config))


def gspo(scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
    """Clipped per answer."""
    lengths = [length - 1 for length in micro_batch.segment_lengths]
    return policy_losses.gspo(scores.logprobs, answer_lengths=lengths, **_read(micro_batch, config))


def cispo(scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
    """REINFORCE with a clipped weight."""
    return policy_losses.cispo(scores.logprobs, **_read(micro_batch, config))


LOSSES: Mapping[str, PolicyLoss] = {"ppo": PolicyLoss(ppo), "gspo": PolicyLoss(gspo), "cispo": PolicyLoss(cispo)}


def loss_named(name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> PolicyLoss:
    """The loss of this name or import path, with its settings.

    Raises:
        ValueError: if there is none, or the settings are not its own.
        ImportError: if its module cannot be imported.
    """
    found = configured(built_in_or_loaded(name, LOSSES, what="loss"), settings, key="ppo.loss_settings")
    return found if isinstance(found, PolicyLoss) else PolicyLoss(found, inputs=getattr(found, "inputs", ()))


class Luffy(FrozenConfig):
    """LUFFY: answers that were shown, and not made, are learned beside the policy's own.

    rollout.demonstrations: solution ──► one answer of each group is the row's, judged as the others are; versions -1
    L = PPO's loss                                                 where the policy has made the token
    L = -A * p / (p + gamma),  p = exp(logprob_current)            where it was shown, by who says nothing else

    Yan et al. 2025, https://arxiv.org/abs/2504.14945: the shape keeps a gradient for what is improbable still.

    Raises:
        ValueError: with `use_decoupled_loss`, whose weights would be p for what was shown.
    """

    gamma: float = Field(default=0.1, gt=0.0)
    """Of the shape: a shown token is learned fastest where its probability is about this."""
    inputs: ClassVar[tuple[Key, ...]] = built_in("versions")

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
        if config.use_decoupled_loss:
            raise ValueError("LUFFY has a ratio of its own; set ppo.use_decoupled_loss: false")
        probabilities = torch.exp(scores.logprobs)
        losses = -micro_batch.tensors["advantages"] * probabilities / (probabilities + self.gamma)
        return _on_demonstrations(losses, scores, micro_batch, config, name="luffy")


class SFTMix(FrozenConfig):
    """Answers that were shown are learned by maximum likelihood, beside what the policy makes of its own.

    rollout.demonstrations: solution ──► one answer of each group is the row's; versions -1
    L = PPO's loss                                 where the policy has made the token
    L = -coef * logprob_current                    where it was shown, whatever the reward says of it

    Both are in one mean, so that `coef` is the weight of a shown token beside one that was made.

    Raises:
        ValueError: with `use_decoupled_loss`, which would weigh what was shown by its probability.
    """

    coef: float = Field(default=0.1, ge=0.0)
    """Weight of what was shown."""
    inputs: ClassVar[tuple[Key, ...]] = built_in("versions")

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
        if config.use_decoupled_loss:
            raise ValueError("what was shown has no policy that made it; set ppo.use_decoupled_loss: false")
        return _on_demonstrations(-self.coef * scores.logprobs, scores, micro_batch, config, name="sft_mix")


def _on_demonstrations(
    losses: Tensor, scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig, *, name: str
) -> TokenLosses:
    """These losses [T] of the tokens that were shown, and PPO's of the tokens that the policy has made."""
    keys, own = micro_batch.tensors, ppo(scores, micro_batch, config)
    demonstrated = keys["loss_mask"] & (keys["versions"] < 0)
    stats = {key: torch.where(demonstrated, 0.0, values) for key, values in own.stats.items()}
    return TokenLosses(torch.where(demonstrated, losses, own.losses), stats | {f"{name}/shown_fraction": demonstrated})


class SelfImitation(FrozenConfig):
    """Answers better than their baseline are learned like demonstrations, beside PPO's loss.

    L = PPO's loss - coef * max(A, 0) * logprob_current        no ratio, no clip: answers of old weights stay of use

    Oh et al. 2018, https://arxiv.org/abs/1806.05635, eq. 2, on the answers of the step in place of a buffer of
    episodes.

    Raises:
        ValueError: with `use_decoupled_loss`, whose weights and cap would act on the imitation, too.
    """

    coef: float = Field(default=0.1, ge=0.0)
    """Weight of what is imitated."""
    inputs: ClassVar[tuple[Key, ...]] = ()

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
        if config.use_decoupled_loss:
            raise ValueError("self-imitation has no ratio; set ppo.use_decoupled_loss: false")
        clipped, better = ppo(scores, micro_batch, config), micro_batch.tensors["advantages"].clamp(min=0.0)
        stats = {**clipped.stats, "self_imitation/fraction": better > 0.0}
        return TokenLosses(clipped.losses - self.coef * better * scores.logprobs, stats)
