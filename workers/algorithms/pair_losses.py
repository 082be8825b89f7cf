"""Pair losses: plain functions of what is known of pairs of answers.

    PairScores ──loss(pairs, config)──► (losses, margins), each [pairs]                       dpo ipo simpo kto

The interface does the rest for every loss alike: it pairs answers, masks prompts, takes the reference off, and counts.
One of the user's own is a function of the same form, named by its import path; with settings it is a configuration
class, whose fields they are and whose instances are called.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from corral.experiments.config.algorithm import DPOConfig
from corral.workers.algorithms.functional.losses import dpo_loss, ipo_loss, kto_loss
from corral.workers.user_code.loading import built_in_or_loaded, configured


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScores:
    """Of each pair, [pairs]; those of a micro-batch that is padding are none."""

    chosen: Tensor
    """Log-ratio of the preferred answer to the reference, summed over its tokens; its log-probability without one."""
    rejected: Tensor
    """The same of the other."""
    chosen_tokens: Tensor
    """Tokens of the preferred answer, without its prompt."""
    rejected_tokens: Tensor
    reference_point: Tensor | None = None
    """With kto: beta times the divergence of the policy from the reference, at least 0."""

    @property
    def gain_per_token(self) -> Tensor:
        """Mean over the tokens of the preferred answer, less that of the other."""
        return self.chosen / self.chosen_tokens.clamp(min=1) - self.rejected / self.rejected_tokens.clamp(min=1)


PairLoss = Callable[[PairScores, DPOConfig], tuple[Tensor, Tensor]]
"""A margin is above 0 where the chosen answer is ahead: that is what accuracy counts."""


def dpo(pairs: PairScores, config: DPOConfig) -> tuple[Tensor, Tensor]:
    """The implicit reward of the chosen answer is to be ahead."""
    margins = config.beta * (pairs.chosen - pairs.rejected)
    return dpo_loss(margins, label_smoothing=config.label_smoothing), margins


def ipo(pairs: PairScores, config: DPOConfig) -> tuple[Tensor, Tensor]:
    """By so much, and no more."""
    return ipo_loss(pairs.gain_per_token, tau=config.beta), config.beta * pairs.gain_per_token


def simpo(pairs: PairScores, config: DPOConfig) -> tuple[Tensor, Tensor]:
    """Per token, and without a reference: Meng et al. 2024, https://arxiv.org/abs/2405.14734, eq. 6."""
    margins = config.beta * pairs.gain_per_token
    return dpo_loss(margins - config.target_margin, label_smoothing=config.label_smoothing), margins


def kto(pairs: PairScores, config: DPOConfig) -> tuple[Tensor, Tensor]:
    """Each answer by itself, against a point that the batch has in common."""
    assert pairs.reference_point is not None, "the interface measures it before the step"
    chosen, rejected = config.beta * pairs.chosen, config.beta * pairs.rejected
    return kto_loss(chosen, rejected, reference_point=pairs.reference_point), chosen - rejected


PAIR_LOSSES: Mapping[str, PairLoss] = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "kto": kto}


def pair_loss_of(config: DPOConfig) -> PairLoss:
    """The loss that the configuration names, with its settings.

    Raises:
        ValueError: if there is none, or the settings are not its own.
        ImportError: if its module cannot be imported.
    """
    found: Any = built_in_or_loaded(config.loss, PAIR_LOSSES, what="loss of pairs")
    loss: PairLoss = configured(found, config.loss_settings, key="dpo.loss_settings")
    return loss
