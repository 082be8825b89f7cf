"""Advantage estimators: plain functions from a batch of judged answers to keys per token, and the keys they declare.

An answer is an episode of one or more sequences. What compares answers compares episodes; what follows a sequence from
token to token takes the tokens that were made, one after the other: what was given in between is no step of the policy.

    AdvantageBatch ──estimator(batch, config)──► {"advantages": [T], ...}       group_relative rloo opo ...

One of the user's own is a function of the same form, named by its import path; if it reads or makes keys that are not
built in, it is wrapped: `mine = AdvantageEstimator(_mine, inputs=(Key(...),))`. One with settings is a configuration
class, whose fields they are and whose instances are called; its keys are its ClassVars `inputs` and `outputs`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from corral.experiments.config.algorithm import PPOConfig
from corral.scheduling.keys import Key, built_in
from corral.workers.algorithms.functional import advantages
from corral.workers.algorithms.functional.packed import per_token, sum_per_answer, with_one_more
from corral.workers.user_code.loading import built_in_or_loaded, configured


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageBatch:
    """What an estimator knows of this rank's answers: n sequences of m episodes, packed into T entries, one per token
    that was predicted. n is m unless the trial's agent makes several sequences of an episode."""

    token_rewards: Tensor
    """[T] float32: what was given for each token that was made: the shaped reward at a sequence's last one, with it
    whatever the sequences that follow in its episode were given; rewards of turns where they stand; less a KL penalty
    at every token, if it is set."""
    response_mask: Tensor
    """[T] bool, True on tokens that were made; others may stand between them."""
    answer_lengths: Sequence[int]
    """Entries of each sequence; they add up to T."""
    group_sizes: Sequence[int]
    """Sequences of each prompt, which lie next to each other; they add up to n."""
    tensors: Mapping[str, Tensor]
    """Every key of the sample, as its layout says."""
    episode_sizes: Sequence[int]
    """Sequences of each episode, which lie next to each other; they add up to n."""
    episodes_per_group: Sequence[int]
    """Episodes of each prompt; they add up to m."""

    @property
    def episode_rewards(self) -> Tensor:
        """[m] float32: everything that an episode was given: its outcome, its turns' rewards, penalties."""
        sums = sum_per_answer(self.token_rewards.double(), self.answer_lengths)
        return sums[self._at_first].float()

    @property
    def episode_tokens(self) -> Tensor:
        """[m] int64: how many tokens were made in an episode."""
        return sum_per_answer(sum_per_answer(self.response_mask.long(), self.answer_lengths), self.episode_sizes)

    @property
    def answer_rewards(self) -> Tensor:
        """[n] float32: everything that a sequence's episode was given."""
        return per_token(self.episode_rewards, self.episode_sizes)

    @property
    def cu_seqlens(self) -> Tensor:
        """[n + 1] int64 boundaries of the sequences."""
        return _boundaries(torch.tensor(self.answer_lengths, dtype=torch.int64))

    @property
    def cu_made(self) -> Tensor:
        """[n + 1] int64 boundaries of the sequences among the tokens that were made: what the mask leaves of T."""
        return _boundaries(sum_per_answer(self.response_mask.long(), self.answer_lengths))

    @property
    def is_last(self) -> Tensor:
        """[n] bool: whether a sequence is the last one of its episode."""
        ends = torch.zeros(sum(self.episode_sizes), dtype=torch.bool)
        ends[_boundaries(torch.tensor(self.episode_sizes, dtype=torch.int64))[1:] - 1] = True
        return ends

    def per_token(self, answer_values: Tensor) -> Tensor:
        """[T]: each sequence's value at all of its tokens."""
        return per_token(answer_values, self.answer_lengths)

    def per_episode_to_tokens(self, episode_values: Tensor) -> Tensor:
        """[T]: each episode's value at all tokens of all its sequences."""
        return self.per_token(per_token(episode_values, self.episode_sizes))

    def made_to_tokens(self, made_values: Tensor) -> Tensor:
        """[T]: the values of tokens that were made, in their places; 0 elsewhere."""
        values = torch.zeros(self.response_mask.shape, dtype=made_values.dtype)
        values[self.response_mask] = made_values
        return values

    @property
    def _at_first(self) -> Tensor:
        """[m] int64: the first sequence of each episode."""
        return _boundaries(torch.tensor(self.episode_sizes, dtype=torch.int64))[:-1]


def _boundaries(lengths: Tensor) -> Tensor:
    """[n + 1] int64, from 0."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


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
    """Compared with the mean of the episodes of the same prompt."""
    per_episode = advantages.group_relative(
        batch.episode_rewards, batch.episodes_per_group, normalize_std=config.group_std_normalization
    )
    return {"advantages": batch.per_episode_to_tokens(per_episode)}


def rloo(batch: AdvantageBatch, config: PPOConfig) -> Mapping[str, Tensor]:
    """Compared with the mean of the other episodes of the same prompt."""
    per_episode = advantages.rloo(batch.episode_rewards, batch.episodes_per_group)
    return {"advantages": batch.per_episode_to_tokens(per_episode)}


def opo(batch: AdvantageBatch, config: PPOConfig) -> Mapping[str, Tensor]:
    """Compared with the mean of the episodes of the same prompt, in which long ones weigh more."""
    per_episode = advantages.opo(batch.episode_rewards, batch.episode_tokens, batch.episodes_per_group)
    return {"advantages": batch.per_episode_to_tokens(per_episode)}


def rewards_to_go(batch: AdvantageBatch, config: PPOConfig) -> Mapping[str, Tensor]:
    """Compared with nothing; normalised over the batch it is REINFORCE++."""
    rewards = batch.token_rewards[batch.response_mask]
    made = advantages.rewards_to_go(rewards, batch.cu_made, gamma=config.discount)
    return {"advantages": batch.made_to_tokens(made)}


def gae(batch: AdvantageBatch, config: PPOConfig) -> Mapping[str, Tensor]:
    """Compared with what a critic expected; it makes the critic's `returns`, too.

    What comes after a token that was made is the value before the next one, having read what was given in between.
    """
    goes_on = batch.tensors["seq_no_eos_mask"] & batch.is_last
    values = advantages.bootstrap_values(
        batch.tensors["values"], goes_on, [length + 1 for length in batch.answer_lengths]
    )
    estimated, returns = advantages.gae(
        batch.token_rewards[batch.response_mask],
        values[with_one_more(batch.response_mask, batch.answer_lengths)],
        batch.cu_made,
        gamma=config.discount,
        lam=config.gae_lambda,
    )
    return {"advantages": batch.made_to_tokens(estimated), "returns": batch.made_to_tokens(returns)}


def none(batch: AdvantageBatch, config: PPOConfig) -> Mapping[str, Tensor]:
    """0: rewards teach nothing, a teacher does."""
    return {"advantages": torch.zeros_like(batch.token_rewards)}


GAE = AdvantageEstimator(gae, inputs=built_in("values", "seq_no_eos_mask"), outputs=built_in("returns"))

ADVANTAGES: Mapping[str, AdvantageEstimator] = {
    "group_relative": AdvantageEstimator(group_relative),
    "rloo": AdvantageEstimator(rloo),
    "opo": AdvantageEstimator(opo),
    "rewards_to_go": AdvantageEstimator(rewards_to_go),
    "gae": GAE,
    "none": AdvantageEstimator(none),
}


def advantage_named(name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> AdvantageEstimator:
    """The estimator of this name or import path, with its settings.

    Raises:
        ValueError: if there is none, or the settings are not its own.
        ImportError: if its module cannot be imported.
    """
    found = configured(built_in_or_loaded(name, ADVANTAGES, what="advantage"), settings, key="ppo.advantage_settings")
    if isinstance(found, AdvantageEstimator):
        return found
    return AdvantageEstimator(found, inputs=getattr(found, "inputs", ()), outputs=getattr(found, "outputs", ()))
