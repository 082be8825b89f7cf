"""Self-imitation: what has come out better than its baseline is learned as if it had been shown, beside PPO's loss.

    L = PPO's loss - coef * max(A, 0) * logprob_current        no ratio, no clip: answers of old weights stay of use

Oh et al. 2018, https://arxiv.org/abs/1806.05635, eq. 2, on the answers of the step in place of a buffer of episodes.
"""

from typing import ClassVar

from pydantic import Field

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.base import FrozenConfig
from corral.scheduling.keys import Key
from corral.workers.algorithms.functional.token_losses import TokenLosses
from corral.workers.algorithms.policy_loss import ppo
from corral.workers.backends.base import TokenScores
from corral.workers.backends.micro_batches import MicroBatch


class SelfImitation(FrozenConfig):
    """A policy loss.

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
