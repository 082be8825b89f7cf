"""Advantage estimators: plain functions from a batch of judged answers to keys per token, and the keys they declare.

    AdvantageBatch ──estimator(batch, config)──► {"advantages": [T], ...}       group_relative rloo rewards_to_go gae

One of the user's own is a function of the same form, named by its import path; if it reads or makes keys that are not
built in, it is wrapped: `mine = AdvantageEstimator(_mine, inputs=(Key(...),))`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corral.experiments.config.algorithm import PPOConfig
from corral.scheduling.keys import Key, built_in
from corral.workers.algorithms.functional import advantages
from corral.workers.algorithms.functional.packed import per_token, sum_per_answer
from corral.workers.user_code.loading import built_in_or_loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageBatch:
    """What an estimator knows of this rank's n answers, packed: T entries, one per token that was predicted."""

    token_rewards: Tensor
    """[T] float32: the shaped reward at each answer's last token, less a KL penalty at every token, if it is set."""
    response_mask: Tensor
    """[T] bool, True on response tokens."""
    answer_lengths: Sequence[int]
    """Entries of each answer; they add up to T."""
    group_sizes: Sequence[int]
    """Answers to each prompt, which lie next to each other; they add up to n."""
    tensors: Mapping[str, Tensor]
    """Every key of the sample, as its layout says."""

    @property
    def answer_rewards(self) -> Tensor:
        """[n] float32: everything that an answer was given, penalties included."""
        return sum_per_answer(self.token_rewards.double(), self.answer_lengths).float()

    @property
    def cu_seqlens(self) -> Tensor:
        """[n + 1] int64 boundaries of the answers."""
        return torch.tensor([0, *self.answer_lengths]).cumsum(0)

    def per_token(self, answer_values: Tensor) -> Tensor:
        """[T]: each answer's value at all of its tokens."""
        return per_token(answer_values, self.answer_lengths)


EstimatorFunction = Callable[[AdvantageBatch, PPOConfig], Mapping[str, Tensor]]
"""Returns `advantages` [T] and what else it makes; what stands on prompt tokens is not read."""


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A function and the keys that it reads and makes besides rewards and advantages."""

    function: EstimatorFunction
    inputs: tuple[Key, ...] = ()
    outputs: tuple[Key, ...] = ()

    def __call__(self, batch: AdvantageBatch, config: PPOConfig) -> Mapping[str, Tensor]:
        """As the function does.

        Raises:
            ValueError: if it does not return the keys that are declared.
        """
        made = self.function(batch, config)
        wanted = {"advantages", *(key.name for key in self.outputs)}
        if made.keys() != wanted:
            raise ValueError(
                f"an advantage estimator must return {sorted(wanted)}, and returned {sorted(made)}; declare what else "
                "it makes as outputs of an AdvantageEstimator"
            )
        return made


def group_relative(batch: AdvantageBatch, config: PPOConfig) -> Mapping[str, Tensor]:
    """Compared with the mean of the answers to the same prompt."""
    per_answer = advantages.group_relative(
        batch.answer_rewards, batch.group_sizes, normalize_std=config.group_std_normalization
    )
    return {"advantages": batch.per_token(per_answer)}


def rloo(batch: AdvantageBatch, config: PPOConfig) -> Mapping[str, Tensor]:
    """Compared with the mean of the other answers to the same prompt."""
    return {"advantages": batch.per_token(advantages.rloo(batch.answer_rewards, batch.group_sizes))}


def rewards_to_go(batch: AdvantageBatch, config: PPOConfig) -> Mapping[str, Tensor]:
    """Compared with nothing; normalised over the batch it is REINFORCE++."""
    return {"advantages": advantages.rewards_to_go(batch.token_rewards, batch.cu_seqlens, gamma=config.discount)}


def gae(batch: AdvantageBatch, config: PPOConfig) -> Mapping[str, Tensor]:
    """Compared with what a critic expected; it makes the critic's `returns`, too."""
    values = advantages.bootstrap_values(
        batch.tensors["values"], batch.tensors["seq_no_eos_mask"], [length + 1 for length in batch.answer_lengths]
    )
    estimated, returns = advantages.gae(
        batch.token_rewards, values, batch.cu_seqlens, gamma=config.discount, lam=config.gae_lambda
    )
    return {"advantages": estimated, "returns": returns}


GAE = AdvantageEstimator(gae, inputs=built_in("values", "seq_no_eos_mask"), outputs=built_in("returns"))

ADVANTAGES: Mapping[str, AdvantageEstimator] = {
    "group_relative": AdvantageEstimator(group_relative),
    "rloo": AdvantageEstimator(rloo),
    "rewards_to_go": AdvantageEstimator(rewards_to_go),
    "gae": GAE,
}


def advantage_named(name: str) -> AdvantageEstimator:
    """The estimator of this name or import path.

    Raises:
        ValueError: if there is none.
        ImportError: if its module cannot be imported.
    """
    found: Any = built_in_or_loaded(name, ADVANTAGES, what="advantage")
    return found if isinstance(found, AdvantageEstimator) else AdvantageEstimator(found)
