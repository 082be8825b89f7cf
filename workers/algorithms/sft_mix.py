"""SFT mix: answers that were shown are learned by maximum likelihood, beside what the policy makes of its own.

    rollout.demonstrations: solution ──► one answer of each group is the row's; versions -1
    L = PPO's loss                                 where the policy has made the token
    L = -coef * logprob_current                    where it was shown, whatever the reward says of it

Both are in one mean, so that `coef` is the weight of a shown token beside one that was made.
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


class SFTMix(FrozenConfig):
    """A policy loss.

    Raises:
        ValueError: with `use_decoupled_loss`, which would weigh what was shown by its probability.
    """

    coef: float = Field(default=0.1, ge=0.0)
    """Weight of what was shown."""
    inputs: ClassVar[tuple[Key, ...]] = built_in("versions")

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
        if config.use_decoupled_loss:
            raise ValueError("what was shown has no policy that made it; set ppo.use_decoupled_loss: false")
        keys, own = micro_batch.tensors, ppo(scores, micro_batch, config)
        is_shown = keys["loss_mask"] & (keys["versions"] < 0)
        stats = {name: torch.where(is_shown, 0.0, values) for name, values in own.stats.items()}
        losses = torch.where(is_shown, -self.coef * scores.logprobs, own.losses)
        return TokenLosses(losses, stats | {"sft_mix/shown_fraction": is_shown})
