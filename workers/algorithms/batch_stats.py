"""What `metrics.jsonl` says of a global batch, whatever the weights: rewards, lengths, staleness.

    rewards, turn_rewards ─┐
    response mask ─────────┼──► sums of this rank's episodes and tokens ──► one sum, one maximum over ranks ──► means
    versions, experts ─────┘

What is said of answers is of episodes: all sequences of one count once.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from corral.scheduling.keys import EPISODES, ROUTED_EXPERTS, TURN_REWARDS
from corral.workers.algorithms.base import generated, response_mask
from corral.workers.algorithms.functional.packed import sum_per_answer
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample


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
        per_token["ppo/replayed_fraction"] = _is_told(sample)[responses].sum()
    counts = {"answers": rewards.size, "tokens": responses.sum(), "generated": generated(sample.data, responses).sum()}
    total = context.sum_over_ranks({name: float(n) for name, n in (per_answer | per_token | counts).items()})
    stats = {name: total[name] / max(total["answers"], 1.0) for name in per_answer}
    for name in per_token:
        stats[name] = total[name] / max(total["generated" if name == "staleness/mean" else "tokens"], 1.0)
    stats["rewards/std"] = max(0.0, stats["rewards/std"] - stats["rewards/mean"] ** 2) ** 0.5
    stats["ppo/num_answers"] = total["answers"]
    return stats | context.max_over_ranks({name: float(n) for name, n in largest.items()})


def _is_told(sample: SequenceSample) -> npt.NDArray[np.bool_]:
    """By shifted token, whether the experts are known that computed what it was drawn from."""
    rows = sample.data[ROUTED_EXPERTS].reshape(sample.total_length(), -1)
    has_next = np.ones(len(rows), np.bool_)
    has_next[np.cumsum(sample.answer_lengths(), dtype=np.int64) - 1] = False
    is_told: npt.NDArray[np.bool_] = rows.min(axis=1) >= 0
    return is_told[has_next]
