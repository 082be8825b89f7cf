"""What actor and critic make of a batch before they train on it.

    rewards ──shape──► + KL penalty ──► token rewards ──estimator──► advantages ──normalise──┬──► prepared sample
                                                           └──────► returns (of a critic)    │
                                      log-probabilities of a teacher, less those of the makers

Numbers that are not finite train nothing. One of them anywhere in the batch, on any rank, makes every weight of the
loss NaN, so that the engine skips each of the step's updates and counts them, as it does where a loss overflows.

The weight of the KL penalty is fixed, or adapted from step to step to a target.

    coefficient ──► losses or rewards of this step
         ▲ after(divergence of the batch)      once per train step, never per micro-batch

The divergence is that of the policy that generated, measured on the whole batch before anything is trained. It does not
depend on weights or micro-batches, so that every rank, actor and critic alike, arrives at the same coefficient.

An answer here is an episode: where a sample says that some of its sequences are of one, they count as one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.experiments.config.algorithm import KLConfig, PPOConfig
from corral.scheduling.keys import EPISODES, TURN_REWARDS, Key, KeyLayout
from corral.workers.algorithms.advantage import AdvantageBatch, AdvantageEstimator
from corral.workers.algorithms.base import generated, response_mask
from corral.workers.algorithms.functional.advantages import overlong_penalty
from corral.workers.algorithms.functional.kl import adapt_kl_coefficient, approximate_kl, token_rewards
from corral.workers.algorithms.functional.normalization import normalize_over_batch, normalize_per_group
from corral.workers.algorithms.functional.packed import per_token, sum_per_answer
from corral.workers.algorithms.functional.policy_losses import behaviour_weights
from corral.workers.backends.base import Numbers
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """Facts of the global batch, alike on all ranks, before anything is computed from it."""

    is_finite: bool
    """Whether every number that training would read is."""
    num_answers: float
    """Without demonstrations, where the sample says which they are."""
    kl_per_answer: float
    """Nats of k1 between the policy that generated and the reference, mean over these; 0 without a reference."""


def measure_batch(sample: SequenceSample, context: ParallelContext) -> BatchFacts:
    """One sum over the ranks."""
    responses = response_mask(sample)
    demonstrated = torch.from_numpy(responses & ~generated(sample.data, responses)).int()
    num_demonstrated = int((sum_per_answer(demonstrated, [length - 1 for length in sample.answer_lengths()]) > 0).sum())
    kl = 0.0
    if {"old_logprobs", "ref_logprobs"} <= sample.data.keys():
        with np.errstate(invalid="ignore"):  # infinities are found below
            difference = sample.data["old_logprobs"] - sample.data["ref_logprobs"]
            kl = float(difference.sum(where=generated(sample.data, responses), dtype=float))
    nonfinite = _num_nonfinite(sample, responses)
    local = {
        "answers": float(len(sample.episode_sizes()) - num_demonstrated),
        "kl": kl if math.isfinite(kl) else 0.0,
        "nonfinite": float(nonfinite),
    }
    total = context.sum_over_ranks(local)
    return BatchFacts(
        is_finite=total["nonfinite"] == 0.0,
        num_answers=total["answers"],
        kl_per_answer=total["kl"] / max(total["answers"], 1.0),
    )


def _num_nonfinite(sample: SequenceSample, responses: npt.NDArray[np.bool_]) -> int:
    """Entries that are not finite, but for what stands on given tokens: nobody reads that."""
    count = 0
    for key, array in sample.data.items():
        if np.issubdtype(array.dtype, np.floating):
            spec = sample.specs[key]
            is_shifted = spec.layout is KeyLayout.PER_SHIFTED_TOKEN
            is_read = np.repeat(responses, math.prod(spec.shape)) if is_shifted else True
            count += int(np.count_nonzero(~np.isfinite(array) & is_read))
    return count


def shape_rewards(config: PPOConfig, sample: SequenceSample) -> npt.NDArray[np.float32]:
    """[n] rewards; 0 for answers that were cut off, if the configuration says so.

    The sequences of an episode have the outcome that stands on its last one: a reward model sees each by itself.
    What makes an episode overlong is all tokens that were made in it.
    """
    sizes = np.array(sample.episode_sizes(), np.int64)
    ends = np.repeat(np.cumsum(sizes) - 1, sizes)
    raw: npt.NDArray[np.float32] = np.asarray(sample.data["rewards"], dtype=np.float32)[ends]
    if config.overlong_buffer is not None and config.overlong_limit is not None:
        responses = torch.from_numpy(response_mask(sample)).long()
        tokens = sum_per_answer(responses, [length - 1 for length in sample.answer_lengths()])
        episodes = per_token(sum_per_answer(tokens, sizes.tolist()), sizes.tolist())
        penalty = overlong_penalty(episodes, limit=config.overlong_limit, buffer=config.overlong_buffer)
        raw = raw - penalty.numpy().astype(np.float32)
    if config.mask_no_eos_with_zero:
        raw = np.where(np.asarray(sample.data["seq_no_eos_mask"])[ends], np.float32(0.0), raw)
    return raw


def advantage_batch(config: PPOConfig, sample: SequenceSample, *, kl_coefficient: float) -> AdvantageBatch:
    """The input of estimators; the KL penalty is in the rewards where the configuration puts it there."""
    tensors = {key: torch.as_tensor(array) for key, array in sample.data.items()}
    responses = torch.from_numpy(response_mask(sample))
    lengths = [length - 1 for length in sample.answer_lengths()]
    kl = (
        approximate_kl(tensors["old_logprobs"], tensors["ref_logprobs"], estimator="k1")
        if config.kl.is_charged
        else torch.zeros(sum(lengths))
    )
    turns = tensors.get(TURN_REWARDS)
    return AdvantageBatch(
        token_rewards=token_rewards(
            torch.from_numpy(shape_rewards(config, sample)),
            torch.where(generated(tensors, responses), kl, 0.0),
            responses,
            lengths,
            kl_coefficient=kl_coefficient,
            turn_rewards=turns,
            episode_sizes=sample.episode_sizes() if EPISODES in sample.data else None,
        ),
        response_mask=responses,
        answer_lengths=lengths,
        group_sizes=sample.num_answers_per_sample(),
        tensors=tensors,
        episode_sizes=sample.episode_sizes(),
        episodes_per_group=sample.num_episodes_per_sample(),
    )


def prepare_actor_sample(
    config: PPOConfig,
    sample: SequenceSample,
    *,
    estimator: AdvantageEstimator,
    kl_coefficient: float,
    context: ParallelContext,
) -> SequenceSample:
    """The sample with `loss_mask`, `advantages` and, where it has the proximal policy, `behaviour_weights`.

    Where it says of episodes, also with what a mean over them divides by.
    """
    batch = advantage_batch(config, sample, kl_coefficient=kl_coefficient)
    made = dict(estimator(batch, config))
    advantages = torch.where(batch.response_mask, made.pop("advantages"), 0.0)
    advantages = _normalize(config, advantages, batch, context)
    if config.distillation.coef > 0.0 and config.distillation.top_k is None:
        advantages = advantages + config.distillation.coef * teacher_advantages(batch)
    sample = sample.with_key("advantages", advantages.numpy())
    declared: dict[str, Key] = {key.name: key for key in estimator.outputs}
    for name, values in made.items():
        sample = sample.with_key(declared[name], values.numpy().astype(declared[name].dtype, copy=False))
    loss_mask = batch.response_mask
    if config.use_decoupled_loss and "proximal_logprobs" in batch.tensors:
        keys = {**batch.tensors, "advantages": torch.from_numpy(sample.data["advantages"])}
        weights, loss_mask = weigh_behaviour(
            config, keys, keys["proximal_logprobs"], loss_mask, answer_lengths=batch.answer_lengths
        )
        sample = sample.with_key("behaviour_weights", weights.numpy())
    sample = sample.with_key("loss_mask", loss_mask.numpy())
    return _with_episode_tokens(sample) if EPISODES in sample.data else sample


def teacher_advantages(batch: AdvantageBatch) -> Tensor:
    """[T] nats by which the teacher finds each token likelier than its policy did; 0 on tokens that no policy made.

    Their mean over what a policy makes is minus its reverse KL divergence to the teacher, and the gradient of that is
    the policy gradient with these advantages: nothing of a later token is an earlier one's merit (discount 0).
    """
    advantages = -approximate_kl(batch.tensors["old_logprobs"], batch.tensors["teacher_logprobs"], estimator="k1")
    return torch.where(generated(batch.tensors, batch.response_mask), advantages, 0.0)


def _with_episode_tokens(sample: SequenceSample) -> SequenceSample:
    """The sample with `episode_tokens` and `counts_episode`: a micro-batch may have some sequences of an episode, and
    divides by the tokens of all."""
    lengths, sizes = [length - 1 for length in sample.answer_lengths()], sample.episode_sizes()
    tokens = sum_per_answer(torch.from_numpy(sample.data["loss_mask"]).int(), lengths)
    per_sequence = per_token(sum_per_answer(tokens, sizes), sizes)
    numbers = np.repeat(np.arange(len(sizes)), np.array(sizes, np.int64))
    with_tokens = np.flatnonzero(tokens.numpy())
    counts = np.zeros(len(numbers), np.bool_)
    counts[with_tokens[np.unique(numbers[with_tokens], return_index=True)[1]]] = True
    return sample.with_key("episode_tokens", per_sequence.numpy()).with_key("counts_episode", counts)


def weigh_behaviour(
    config: PPOConfig,
    keys: Mapping[str, Tensor],
    proximal_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    answer_lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(weights of the tokens in the decoupled loss, the loss mask without those that it leaves out).

    Bounds leave no demonstration out: its weight is its probability, as that of a policy that says nothing else.
    """
    is_generated = generated(keys, loss_mask)
    floor, cap = config.is_ratio_bounds
    weights, kept = behaviour_weights(
        proximal_logprobs,
        keys["old_logprobs"],
        is_generated,
        cap=cap,
        floor=floor,
        truncates=config.truncates_ratios,
        level=config.is_ratio_level,
        answer_lengths=answer_lengths,
    )
    demonstrated = loss_mask & ~is_generated
    return torch.where(demonstrated, proximal_logprobs.exp(), torch.where(kept, weights, 0.0)), kept | demonstrated


def _normalize(config: PPOConfig, advantages: Tensor, batch: AdvantageBatch, context: ParallelContext) -> Tensor:
    if config.advantage_normalization == "batch":
        return normalize_over_batch(advantages, batch.response_mask, sum_over_ranks=context.sum_over_ranks)
    if config.advantage_normalization == "group":
        return normalize_per_group(advantages, batch.response_mask, batch.answer_lengths, batch.group_sizes)
    return advantages.float()


def with_loss_weights(sample: SequenceSample, *, is_finite: bool) -> SequenceSample:
    """The sample with `loss_weights` of 1, or of NaN where nothing may be trained."""
    num_tokens = sample.total_length("loss_mask")
    return sample.with_key("loss_weights", np.full(num_tokens, 1.0 if is_finite else np.nan, np.float32))


_COEFFICIENT = "kl_coefficient"
KL_HORIZON = 10_000.0
"""Answers in which an adaptive coefficient changes by at most a fifth."""


@dataclass(frozen=True, slots=True)
class KLController:
    """A coefficient and the rule by which it changes."""

    config: KLConfig
    coefficient: float

    @classmethod
    def at_start(cls, config: KLConfig) -> "KLController":
        return cls(config, config.coef)

    def after(self, facts: BatchFacts) -> "KLController":
        """For the next step, having seen a batch that trained something; see `adapt_kl_coefficient`."""
        if self.config.target is None or not facts.is_finite:
            return self
        adapted = adapt_kl_coefficient(
            self.coefficient,
            observed_kl=facts.kl_per_answer,
            target=self.config.target,
            horizon=KL_HORIZON,
            num_answers=facts.num_answers,
        )
        return replace(self, coefficient=adapted)

    def state_dict(self) -> Numbers:
        """What a checkpoint keeps: nothing of a coefficient that is fixed."""
        return {} if self.config.target is None else {_COEFFICIENT: self.coefficient}

    def with_state(self, state: Numbers) -> "KLController":
        """The controller that `state_dict` described.

        Raises:
            ValueError: if it is missing.
        """
        if self.config.target is None:
            return self
        coefficient = state.get(_COEFFICIENT)
        if not isinstance(coefficient, float | int):
            raise ValueError(
                f"kl.target is set, but the checkpoint has no {_COEFFICIENT!r}: it was written without an adaptive "
                "coefficient; remove kl.target, or start a new trial from its weights"
            )
        return replace(self, coefficient=float(coefficient))
