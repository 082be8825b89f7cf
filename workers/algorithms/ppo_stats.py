"""Statistics of a batch of judged answers: what `metrics.jsonl` says of rewards, lengths and staleness."""

import numpy as np
import numpy.typing as npt

from corral.scheduling.keys import ROUTED_EXPERTS
from corral.workers.algorithms.base import response_mask
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample


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
    if ROUTED_EXPERTS in sample.data:
        sums["replayed"] = float(_is_told(sample)[responses].sum())
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
    if "replayed" in total:
        stats["ppo/replayed_fraction"] = total["replayed"] / num_tokens
    return stats


def _is_told(sample: SequenceSample) -> npt.NDArray[np.bool_]:
    """By shifted token, whether the experts are known that computed what it was drawn from."""
    rows = sample.data[ROUTED_EXPERTS].reshape(sample.total_length(), -1)
    has_next = np.ones(len(rows), np.bool_)
    has_next[np.cumsum(sample.answer_lengths(), dtype=np.int64) - 1] = False
    is_told: npt.NDArray[np.bool_] = rows.min(axis=1) >= 0
    return is_told[has_next]


def _response_lengths(sample: SequenceSample, responses: npt.NDArray[np.bool_]) -> list[int]:
    ends = np.cumsum([length - 1 for length in sample.answer_lengths()], dtype=np.int64)
    counts = np.concatenate([[0], np.cumsum(responses)])
    return [int(n) for n in np.diff(np.concatenate([[0], counts[ends]]))]
