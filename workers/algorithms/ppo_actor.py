"""The PPO actor: GRPO and its relatives with advantages that need no critic, PPO with those of a critic.

inference    input_ids ─► logprobs                        (renamed to proximal_logprobs or ref_logprobs by the call)

train_step   rewards ─► shaped rewards ─► advantages ┐
             proximal / old logprobs ─► weights, cap ┴─► prepared sample ─► mini-batches ─► engine.train_batch
             without proximal_logprobs, in the loss: its own logprobs, without gradient
             divergence from the reference ─► KL coefficient of the next step                    │ too far: stop early
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.experiments.config.algorithm import DistillationConfig, PPOConfig
from corral.experiments.worker_specs import BehaviourSpec
from corral.scheduling.keys import (
    EPISODES,
    ROUTED_EXPERTS,
    TEACHER_TOPK_LOGPROBS,
    TURN_REWARDS,
    built_in,
    keys_of_teachers,
)
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.advantage import advantage_named
from corral.workers.algorithms.base import (
    STEPS_SKIPPED_EARLY,
    CallKeys,
    ModelInterface,
    compute_logprobs,
    deal_mini_batches,
    generated,
    merge_stats,
    response_mask,
    sum_over_mask,
)
from corral.workers.algorithms.functional.kl import approximate_kl, entropy_of_samples, kl_over_top_k
from corral.workers.algorithms.functional.losses import TokenLosses
from corral.workers.algorithms.functional.packed import sum_per_answer
from corral.workers.algorithms.functional.policy_losses import EpisodeCounts, importance_ratio, reduction_weights
from corral.workers.algorithms.gap_watch import FirstPass, GapWatch, TwoSides
from corral.workers.algorithms.policy_loss import center_logprobs, loss_named
from corral.workers.algorithms.ppo_batch import (
    KLController,
    measure_batch,
    prepare_actor_sample,
    weigh_behaviour,
    with_loss_weights,
)
from corral.workers.algorithms.teacher import with_teachers_merged
from corral.workers.backends.base import LossOutput, Numbers, TokenScores, TrainEngine
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.requests.messages import TrainNotice

_RATIO, _APPROX_KL = "ppo/importance_weight", "ppo/approx_kl"
_GENERATED = "ppo/generated_fraction"
_OF_GENERATED = frozenset({_RATIO, _APPROX_KL, "ppo/ref_kl", "ppo/teacher_kl"})
"""Statistics whose means are over the tokens that the policy generated: those of demonstrations are 0."""


# What `metrics.jsonl` says of a global batch, whatever the weights: rewards, lengths, staleness.
#
#     rewards, turn_rewards ─┐
#     response mask ─────────┼──► sums of this rank's episodes and tokens ──► one sum, one maximum over ranks ──► means
#     versions, experts ─────┘
#
# What is said of answers is of episodes: all sequences of one count once.


def batch_stats(sample: SequenceSample, *, version: int, context: ParallelContext) -> dict[str, float]:
    """Statistics of the global batch that do not depend on the current weights; one sum and one maximum over ranks.

    Those of answers are of episodes, with all their sequences; a reward is the outcome and the rewards of all turns.
    """
    responses, sizes = response_mask(sample), sample.episode_sizes()
    ends = np.cumsum(sizes, dtype=np.int64) - 1

    def per_episode(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        by_token = torch.from_numpy(np.where(responses, values, 0))
        sums = sum_per_answer(by_token, [length - 1 for length in sample.answer_lengths()])
        added_up: npt.NDArray[Any] = sum_per_answer(sums, sizes).numpy()
        return added_up

    rewards = np.asarray(sample.data["rewards"], dtype=np.float64)[ends]
    lengths = per_episode(np.ones(len(responses), np.int64))
    of_episodes: dict[str, float] = {"sequences/mean": sum(sizes)} if EPISODES in sample.data else {}
    if TURN_REWARDS in sample.data:
        of_turns = per_episode(np.asarray(sample.data[TURN_REWARDS], dtype=np.float64))
        rewards, of_episodes["turn_rewards/mean"] = rewards + of_turns, of_turns.sum()
    per_answer = {
        "rewards/mean": rewards.sum(),
        "rewards/std": np.square(rewards).sum(),
        "response_length/mean": responses.sum(),
        **of_episodes,
    }
    per_token = {"ppo/capped_fraction": responses.sum() - np.asarray(sample.data["loss_mask"]).sum()}
    largest = {"response_length/max": max(lengths.tolist(), default=0)}
    if "seq_no_eos_mask" in sample.data:
        per_answer["no_eos_fraction"] = np.asarray(sample.data["seq_no_eos_mask"])[ends].sum()
    if "versions" in sample.data:
        versions = np.asarray(sample.data["versions"], dtype=np.int64)
        staleness = (version - versions)[generated(sample.data, responses)]  # a demonstration has no age
        per_token["staleness/mean"] = staleness.sum()
        largest["staleness/max"] = staleness.max(initial=0)
    if ROUTED_EXPERTS in sample.data:
        per_token["ppo/replayed_fraction"] = _is_replayed(sample)[responses].sum()
    counts = {"answers": rewards.size, "tokens": responses.sum(), "generated": generated(sample.data, responses).sum()}
    total = context.sum_over_ranks({name: float(n) for name, n in (per_answer | per_token | counts).items()})
    stats = {name: total[name] / max(total["answers"], 1.0) for name in per_answer}
    for name in per_token:
        stats[name] = total[name] / max(total["generated" if name == "staleness/mean" else "tokens"], 1.0)
    stats["rewards/std"] = max(0.0, stats["rewards/std"] - stats["rewards/mean"] ** 2) ** 0.5
    stats["ppo/num_answers"] = total["answers"]
    return stats | context.max_over_ranks({name: float(n) for name, n in largest.items()})


def _is_replayed(sample: SequenceSample) -> npt.NDArray[np.bool_]:
    """By shifted token, whether the experts that computed its logits are recorded."""
    rows = sample.data[ROUTED_EXPERTS].reshape(sample.total_length(), -1)
    has_next = np.ones(len(rows), np.bool_)
    has_next[np.cumsum(sample.answer_lengths(), dtype=np.int64) - 1] = False
    is_replayed: npt.NDArray[np.bool_] = rows.min(axis=1) >= 0
    return is_replayed[has_next]


class PPOActorInterface(ModelInterface):
    """Policy updates; see `PPOConfig` for the settings.

    Raises:
        ValueError: if the loss or the advantage is not there.
        ImportError: if one of the user's own cannot be imported.
    """

    outputs = {CallType.INFERENCE: built_in("logprobs")}

    def __init__(
        self,
        config: PPOConfig,
        *,
        behaviour: BehaviourSpec | None = None,
        dtype: str = "float32",
        seed: int = 0,
        taught_sources: Sequence[str] = (),
    ) -> None:
        """
        Args:
            behaviour: who makes the answers (None: by all defaults); log-probabilities are those of the distribution
                that it samples from.
            dtype: of the engine's matrix products, which the generator's are compared with.
            seed: decides, with the policy version, which answers share a mini-batch.
            taught_sources: of rows, that have teachers of their own.
        """
        behaviour = behaviour or BehaviourSpec()
        self._config = config
        self._temperature = behaviour.sampling.temperature
        self._seed = seed
        self._taught_sources = taught_sources
        self._estimator = advantage_named(config.advantage, config.advantage_settings)
        self._policy_loss = loss_named(config.loss, config.loss_settings)
        self._kl = KLController.at_start(config.kl)
        self._gap = GapWatch(TwoSides(behaviour=behaviour, dtype=dtype, ppo=config))
        self._learned: SequenceSample | None = None

    @property
    def inputs(self) -> CallKeys:
        config, made = self._config, self._estimator.outputs
        needed = ["input_ids", "prompt_mask", "old_logprobs", "rewards"]
        # The weights of a step's only update are those that the step begins with.
        needed += ["proximal_logprobs"] if config.use_decoupled_loss and config.updates_per_step > 1 else []
        needed += ["ref_logprobs"] if config.kl.coef > 0.0 else []
        needed += ["seq_no_eos_mask"] if config.mask_no_eos_with_zero else []
        teaches = config.distillation.coef > 0.0
        taught = keys_of_teachers(self._taught_sources, config.distillation.top_k) if teaches else ()
        of_loss = [key for key in self._policy_loss.inputs if key not in made]
        return {
            CallType.INFERENCE: built_in("input_ids", "prompt_mask"),
            CallType.TRAIN_STEP: tuple(dict.fromkeys([*built_in(*needed), *taught, *self._estimator.inputs, *of_loss])),
        }

    def inference(self, engine: TrainEngine[TokenScores], sample: SequenceSample) -> dict[str, npt.NDArray[np.float32]]:
        """`logprobs` of the answers under the engine's weights."""
        return {"logprobs": compute_logprobs(engine, sample, temperature=self._temperature)}

    def train_step(self, engine: TrainEngine[TokenScores], sample: SequenceSample, *, version: int) -> dict[str, float]:
        """`sample_reuse` passes over this rank's answers, each in `n_minibatches` optimizer steps.

        Once a mini-batch has moved too far, nothing more of the batch is trained on: the rest is counted as skipped.
        """
        config, context = self._config, engine.context
        sample = with_teachers_merged(sample, self._taught_sources, config.distillation.top_k)
        facts = measure_batch(sample, context)
        prepared = prepare_actor_sample(
            config, sample, estimator=self._estimator, kl_coefficient=self._kl.coefficient, context=context
        )
        prepared = with_loss_weights(prepared, is_finite=facts.is_finite)
        stats: list[dict[str, float]] = []
        gap: dict[str, float] = {}
        first_update = engine.step
        for mini_batch in deal_mini_batches(config, prepared, seed=(self._seed, version, context.dp_rank)):
            if stats and stats[-1].get(STEPS_SKIPPED_EARLY):
                stats.append({STEPS_SKIPPED_EARLY: 1.0})
                continue
            loss = self._loss if stats else FirstPass(self._loss)
            means = engine.train_batch(
                mini_batch, loss_fn=loss, temperature=self._temperature, may_step=self._is_near_center
            )
            stats.append(_over_generated(means))
            if isinstance(loss, FirstPass):
                gap = self._gap.look(mini_batch, loss, of=prepared, version=version, context=context)
                # The only mini-batch is all there is, and its own scores are those that the step begins with.
                is_whole = config.n_minibatches == 1 and "proximal_logprobs" not in prepared.data
                scored = ("proximal_logprobs", loss.scores_of(mini_batch)[0])
                self._learned = mini_batch.with_key(*scored) if is_whole else prepared
        gap |= self._gap.measure(
            partial(compute_logprobs, engine, temperature=self._temperature),
            version=version,
            has_moved=engine.step > first_update,
            context=context,
        )
        merged = merge_stats(stats, loss_name="ppo/loss") | gap
        merged |= batch_stats(prepared, version=version, context=context)
        # The loss has found whom to leave out.
        if "behaviour_weights" not in prepared.data and "train/tokens" in merged:
            num_tokens = merged["response_length/mean"] * merged["ppo/num_answers"]
            merged["ppo/capped_fraction"] = 1.0 - merged["train/tokens"] / max(num_tokens, 1.0)
        if config.kl.coef > 0.0:
            merged |= {"ppo/kl_coef": self._kl.coefficient, "ppo/ref_kl_per_answer": facts.kl_per_answer}
        self._kl = self._kl.after(facts)
        return merged

    def take_learned(self) -> SequenceSample | None:
        learned, self._learned = self._learned, None
        return learned

    def take_notices(self) -> list[TrainNotice]:
        return self._gap.take_notices()

    def state_dict(self) -> Numbers:
        return self._kl.state_dict() | self._gap.state_dict()

    def load_state_dict(self, state: Numbers) -> None:
        self._gap.load_state_dict(state)
        self._kl = self._kl.with_state(state)

    def _is_near_center(self, means: Mapping[str, float]) -> bool:
        """Whether the policy is still near the one that its data is read with."""
        ratio = self._config.early_stop_imp_ratio
        return ratio is None or _over_generated(means)[_RATIO] <= ratio

    def _loss(self, scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        config = self._config
        if config.use_decoupled_loss and "behaviour_weights" not in micro_batch.tensors:
            micro_batch = _with_proximal(micro_batch, scores.logprobs.detach(), config)
        keys = micro_batch.tensors
        loss_mask = keys["loss_mask"]
        # Masked before any exp(): what stands on prompt tokens must reach neither a sum nor a gradient.
        asked = None if scores.asked is None else torch.where(loss_mask[:, None], scores.asked, 0.0)
        masked = TokenScores(torch.where(loss_mask, scores.logprobs, 0.0), scores.entropy, asked)
        policy = self._policy_loss(masked, micro_batch, config)
        is_generated = generated(keys, loss_mask)
        center = center_logprobs(micro_batch, config)
        ratio, log_ratio = importance_ratio(masked.logprobs.detach(), center, is_generated)
        stats = {_RATIO: ratio * is_generated, _APPROX_KL: -log_ratio, _GENERATED: is_generated}
        stats |= {"ppo/entropy": scores.entropy, **policy.stats}
        losses = policy.losses
        if "behaviour_weights" in keys:
            losses = losses * keys["behaviour_weights"]
            stats["ppo/behav_weight"] = keys["behaviour_weights"]
            cap = config.is_ratio_bounds[1]
            if config.truncates_ratios and cap is not None:
                stats["ppo/truncated_fraction"] = keys["behaviour_weights"] >= cap
        if config.kl.coef > 0.0:
            reference = torch.where(loss_mask, keys["ref_logprobs"], 0.0)
            kl = approximate_kl(masked.logprobs, reference, estimator=config.kl.estimator_in_place)
            kl = stats["ppo/ref_kl"] = torch.where(is_generated, kl, 0.0)
            if config.kl.place == "loss":
                losses = losses + self._kl.coefficient * kl
        if config.distillation.coef > 0.0:
            divergence = _teacher_kl(masked, keys, config.distillation)
            stats["ppo/teacher_kl"] = torch.where(is_generated, divergence.detach(), 0.0)
            if config.distillation.top_k is not None:
                losses = losses + config.distillation.coef * divergence
        if config.entropy_coef > 0.0:
            entropy = entropy_of_samples(masked.logprobs, scores.entropy)
            losses = losses - config.entropy_coef * torch.where(is_generated, entropy, 0.0)
        weights, denominator = reduction_weights(
            loss_mask,
            [length - 1 for length in micro_batch.segment_lengths],
            reduction=config.loss_reduction,
            divisor=config.loss_divisor,
            episodes=_episode_counts(keys),
        )
        sums = sum_over_mask(TokenLosses(losses, stats), loss_mask, weights=keys["loss_weights"] * weights)
        return replace(sums, denominators=(denominator, loss_mask.sum()))


def _over_generated(means: Mapping[str, float]) -> dict[str, float]:
    """The statistics of a mini-batch, some of which are means over fewer tokens than its loss mask has."""
    fraction = max(means.get(_GENERATED, 1.0), sys.float_info.min)
    own = {name: value for name, value in means.items() if name != _GENERATED}
    return {name: value / fraction if name in _OF_GENERATED else value for name, value in own.items()}


def _episode_counts(keys: Mapping[str, Tensor]) -> EpisodeCounts | None:
    if "episode_tokens" not in keys:
        return None
    return EpisodeCounts(tokens=keys["episode_tokens"], counts=keys["counts_episode"])


def _teacher_kl(scores: TokenScores, keys: Mapping[str, Tensor], config: DistillationConfig) -> Tensor:
    """[T]: the divergence to the teacher in each place of the loss mask; with `top_k` it has a gradient."""
    mask = keys["loss_mask"]
    if scores.asked is None:
        teacher = torch.where(mask, keys["teacher_logprobs"], 0.0)
        return approximate_kl(scores.logprobs.detach(), teacher, estimator="k1")
    teacher = torch.where(mask[:, None], keys[TEACHER_TOPK_LOGPROBS].view_as(scores.asked), 0.0)
    return kl_over_top_k(scores.asked, teacher, is_forward=config.divergence == "forward_kl")


def _with_proximal(micro_batch: MicroBatch, logprobs: Tensor, config: PPOConfig) -> MicroBatch:
    """The keys of the decoupled loss, from the log-probabilities of the weights that the step begins with."""
    keys = micro_batch.tensors
    proximal = torch.where(keys["loss_mask"], logprobs, 0.0)
    lengths = [length - 1 for length in micro_batch.segment_lengths]
    weights, loss_mask = weigh_behaviour(config, keys, proximal, keys["loss_mask"], answer_lengths=lengths)
    made = {"proximal_logprobs": proximal, "behaviour_weights": weights, "loss_mask": loss_mask}
    return replace(micro_batch, tensors=keys | made)
