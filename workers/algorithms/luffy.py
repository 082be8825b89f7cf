"""LUFFY: answers that were shown, and not made, are learned beside the policy's own.

    rollout.demonstrations: solution ──► one answer of each group is the row's, judged as the others are; versions -1
    L = PPO's loss                                                 where the policy has made the token
    L = -A * p / (p + gamma),  p = exp(logprob_current)            where it was shown, by who says nothing else

Yan et al. 2025, https://arxiv.org/abs/2504.14945: the shape keeps a gradient for what is improbable still.
"""

from typing import ClassVar

import torch
from pydantic import Field

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.base import FrozenConfig
from corral.scheduling.keys import Key, built_in
from corral.workers.algorithms.functional.token_losses import TokenLosses
from corral.workers.algorithms.policy_loss import ppo
from corral.workers.backends.base import TokenScores
from corral.workers.backends.micro_batches import MicroBatch


class Luffy(FrozenConfig):
    """A policy loss.

    Raises:
        ValueError: with `use_decoupled_loss`, whose weights would be p for what was shown.
    """

    gamma: float = Field(default=0.1, gt=0.0)
    """Of the shape: a shown token is learned fastest where its probability is about this."""
    inputs: ClassVar[tuple[Key, ...]] = built_in("versions")

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
        if config.use_decoupled_loss:
            raise ValueError("LUFFY has a ratio of its own; set ppo.use_decoupled_loss: false")
        keys, own = micro_batch.tensors, ppo(scores, micro_batch, config)
        is_shown = keys["loss_mask"] & (keys["versions"] < 0)
        stats = {name: torch.where(is_shown, 0.0, values) for name, values in own.stats.items()}
        probabilities = torch.exp(scores.logprobs)
        shown = -keys["advantages"] * probabilities / (probabilities + self.gamma)
        return TokenLosses(torch.where(is_shown, shown, own.losses), stats | {"luffy/shown_fraction": is_shown})
