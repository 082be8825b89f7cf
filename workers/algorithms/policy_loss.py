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
from typing import Any

from torch import Tensor

from corral.experiments.config.algorithm import PPOConfig
from corral.scheduling.keys import Key
from corral.workers.algorithms.functional import policy_losses
from corral.workers.algorithms.functional.token_losses import TokenLosses
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
    """What every built-in loss is told besides the scores."""
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
