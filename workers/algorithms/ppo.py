"""The PPO actor; with group-relative advantages and no critic it is GRPO.

inference    input_ids ─► logprobs                        (renamed to proximal_logprobs or ref_logprobs by the call)

train_step   rewards ─► shaped rewards ─► advantages ┐
             proximal / old logprobs ─► weights, cap ┴─► prepared sample ─► mini-batches ─► engine.train_batch
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt
import torch

from corral.experiments.config.algorithm import PPOConfig
from corral.workers.algorithms.base import compute_logprobs, response_mask, sum_over_mask
from corral.workers.algorithms.functional.advantages import group_relative
from corral.workers.algorithms.functional.kl import approximate_kl
from corral.workers.algorithms.functional.policy_losses import behaviour_weights, importance_ratio, ppo_clip
from corral.workers.algorithms.functional.token_losses import TokenLosses
from corral.workers.backends.base import LossOutput, TrainEngine
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.token_scores import TokenScores
from corral.workers.data.sequence_sample import SequenceSample


@dataclass(frozen=True, slots=True)
class PPOActorInterface:
    """Policy updates; see `PPOConfig` for the settings."""

    config: PPOConfig
    _: KW_ONLY
    temperature: float = 1.0
    """That the answers were sampled with; log-probabilities are those of the same distribution."""
    seed: int = 0
    """Decides, with the policy version, which answers share a mini-batch."""

    def inference(self, engine: TrainEngine[TokenScores], sample: SequenceSample) -> dict[str, npt.NDArray[np.float32]]:
        """`logprobs` of the answers under the engine's weights."""
        return {"logprobs": compute_logprobs(engine, sample, temperature=self.temperature)}

    def train_step(self, engine: TrainEngine[TokenScores], sample: SequenceSample, *, version: int) -> dict[str, float]:
        """One pass over this rank's answers in `n_minibatches` optimizer steps."""
        prepared = prepare_actor_sample(self.config, sample)
        stats = [
            engine.train_batch(mini_batch, loss_fn=self._loss, temperature=self.temperature)
            for mini_batch in self._mini_batches(prepared, version=version, dp_rank=engine.context.dp_rank)
        ]
        return merge_mini_batch_stats(stats, loss_name="ppo/loss") | batch_stats(
            prepared, version=version, context=engine.context
        )

    def _mini_batches(self, sample: SequenceSample, *, version: int, dp_rank: int) -> list[SequenceSample]:
        """Answers dealt at random into `n_minibatches` parts; a part may be empty on a rank with few answers."""
        answers = sample.ungroup()
        if self.config.n_minibatches == 1:
            return [answers]
        order = np.random.default_rng([self.seed, version, dp_rank]).permutation(len(answers))
        parts = np.array_split(order, self.config.n_minibatches)
        return [answers.select([answers.uids[index] for index in sorted(part)]) for part in parts]

    def _loss(self, scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        keys, config = micro_batch.tensors, self.config
        loss_mask = keys["loss_mask"]
        # Masked before any exp(): what stands on prompt tokens must reach neither a sum nor a gradient.
        logprobs = torch.where(loss_mask, scores.logprobs, 0.0)
        center = keys["proximal_logprobs" if config.use_decoupled_loss else "old_logprobs"]
        ppo = ppo_clip(
            logprobs,
            center_logprobs=center,
            advantages=keys["advantages"],
            loss_mask=loss_mask,
            eps_clip=config.eps_clip,
            c_clip=config.c_clip,
        )
        ratio, log_ratio = importance_ratio(logprobs.detach(), center, loss_mask)
        stats = ppo.stats | {
            "ppo/importance_weight": ratio,
            "ppo/approx_kl": -log_ratio,
            "ppo/entropy": scores.entropy,
        }
        losses = ppo.losses
        if "behaviour_weights" in keys:
            losses = losses * keys["behaviour_weights"]
            stats["ppo/behav_weight"] = keys["behaviour_weights"]
        if config.kl_coef > 0.0:
            kl = approximate_kl(logprobs, torch.where(loss_mask, keys["ref_logprobs"], 0.0))
            losses = losses + config.kl_coef * kl
            stats["ppo/ref_kl"] = kl
        return sum_over_mask(TokenLosses(losses, stats), loss_mask)


def shape_rewards(config: PPOConfig, sample: SequenceSample) -> npt.NDArray[np.float32]:
    """Rewards shifted, scaled and clipped; 0 for answers that were cut off, if the configuration says so."""
    raw: npt.NDArray[np.float32] = np.asarray(sample.data["rewards"], dtype=np.float32)
    shaped: npt.NDArray[np.float32] = np.clip(
        (raw - config.reward_bias) * config.reward_scale, -config.max_reward_clip, config.max_reward_clip
    ).astype(np.float32)
    if config.mask_no_eos_with_zero:
        shaped = np.where(np.asarray(sample.data["seq_no_eos_mask"]), np.float32(0.0), shaped)
    return shaped


def prepare_actor_sample(config: PPOConfig, sample: SequenceSample) -> SequenceSample:
    """The sample with `loss_mask`, `advantages` and, for the decoupled loss, `behaviour_weights`.

    Raises:
        ValueError: if a key that the configuration calls for is missing.
    """
    _require_keys(config, sample)
    loss_mask = response_mask(sample)
    per_answer = group_relative(
        torch.from_numpy(shape_rewards(config, sample)),
        sample.num_answers_per_sample(),
        normalize_std=config.group_std_normalization,
    ).numpy()
    per_token = np.repeat(per_answer, [length - 1 for length in sample.answer_lengths()])
    sample = sample.with_key("advantages", np.where(loss_mask, per_token, np.float32(0.0)))
    if config.use_decoupled_loss:
        weights, kept = behaviour_weights(
            torch.as_tensor(sample.data["proximal_logprobs"]),
            torch.as_tensor(sample.data["old_logprobs"]),
            torch.from_numpy(loss_mask),
            cap=config.behav_imp_weight_cap,
        )
        loss_mask = kept.numpy()
        sample = sample.with_key("behaviour_weights", weights.numpy())
    return sample.with_key("loss_mask", loss_mask)


def _require_keys(config: PPOConfig, sample: SequenceSample) -> None:
    wanted = {
        "proximal_logprobs": (config.use_decoupled_loss, "use_decoupled_loss", "an inference call of the actor"),
        "ref_logprobs": (config.kl_coef > 0.0, "kl_coef above 0", "an inference call of the reference"),
        "seq_no_eos_mask": (config.mask_no_eos_with_zero, "mask_no_eos_with_zero", "the rollout workers"),
    }
    for key, (is_needed, setting, producer) in wanted.items():
        if is_needed and key not in sample.data:
            raise ValueError(
                f"{setting} needs the key {key!r}, which {producer} produces; the sample has {sorted(sample.data)}"
            )


def batch_stats(sample: SequenceSample, *, version: int, context: ParallelContext) -> dict[str, float]:
    """Statistics of the global batch that do not depend on the current weights; one sum and one maximum over ranks."""
    rewards = np.asarray(sample.data["rewards"], dtype=np.float64)
    trained = np.asarray(sample.data["loss_mask"])
    responses = response_mask(sample)
    sums = {
        "answers": float(rewards.size),
        "rewards": float(rewards.sum()),
        "squared_rewards": float(np.square(rewards).sum()),
        "response_tokens": float(responses.sum()),
        "trained_tokens": float(trained.sum()),
    }
    maxima = {"response_tokens": float(max(_response_lengths(sample, responses), default=0))}
    if "seq_no_eos_mask" in sample.data:
        sums["no_eos"] = float(np.asarray(sample.data["seq_no_eos_mask"]).sum())
    if "versions" in sample.data:
        staleness = (version - np.asarray(sample.data["versions"], dtype=np.int64))[responses]
        sums["staleness"] = float(staleness.sum())
        maxima["staleness"] = float(staleness.max(initial=0))
    total, largest = context.sum_over_ranks(sums), context.max_over_ranks(maxima)
    num_answers, num_tokens = max(total["answers"], 1.0), max(total["response_tokens"], 1.0)
    mean = total["rewards"] / num_answers
    stats = {
        "rewards/mean": mean,
        "rewards/std": max(0.0, total["squared_rewards"] / num_answers - mean**2) ** 0.5,
        "response_length/mean": total["response_tokens"] / num_answers,
        "response_length/max": largest["response_tokens"],
        "ppo/capped_fraction": 1.0 - total["trained_tokens"] / num_tokens,
        "ppo/num_answers": total["answers"],
    }
    if "no_eos" in total:
        stats["no_eos_fraction"] = total["no_eos"] / num_answers
    if "staleness" in total:
        stats |= {"staleness/mean": total["staleness"] / num_tokens, "staleness/max": largest["staleness"]}
    return stats


def _response_lengths(sample: SequenceSample, responses: npt.NDArray[np.bool_]) -> list[int]:
    ends = np.cumsum([length - 1 for length in sample.answer_lengths()], dtype=np.int64)
    counts = np.concatenate([[0], np.cumsum(responses)])
    return [int(n) for n in np.diff(np.concatenate([[0], counts[ends]]))]


def merge_mini_batch_stats(stats: Sequence[dict[str, float]], *, loss_name: str) -> dict[str, float]:
    """Means over the mini-batches that made a step; counts of tokens and skipped steps are added up."""
    values: dict[str, list[float]] = defaultdict(list)
    for mini_batch in stats:
        for name, value in mini_batch.items():
            values[loss_name if name == "loss" else name].append(value)
    is_count = {"train/tokens", "train/skipped_nonfinite", "train/skipped_empty", "train/skipped_early_stop"}
    return {name: sum(v) if name in is_count else sum(v) / len(v) for name, v in values.items()}
