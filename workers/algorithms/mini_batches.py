"""One train step as several optimizer steps: answers -> mini-batches -> statistics of the step.

    answers ──deal──► parts of pass 0 | parts of pass 1 | ...  ──► one optimizer step each ──merge_stats──► one line

Each rank deals its own answers, so that no sample moves for it. An episode is dealt with all its sequences.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from corral.experiments.config.algorithm import PPOConfig
from corral.workers.data.sequence_sample import SequenceSample, answer_slices

STEPS_SKIPPED_EARLY = "train/skipped_early_stop"

_COUNTS = {"train/tokens", "train/skipped_nonfinite", "train/skipped_empty", STEPS_SKIPPED_EARLY}


def deal_mini_batches(config: PPOConfig, sample: SequenceSample, *, seed: Sequence[int]) -> Iterator[SequenceSample]:
    """`sample_reuse` passes over the answers, each dealt anew into `n_minibatches` parts of equal numbers of answers.

    Answers stay with the others of their prompt in the same part, so that rows may have it once (`shared_prompts`).
    The same seed deals alike: the trial's, the version, and the data-parallel rank. A part may be empty on a rank with
    few answers; every rank deals the same number of parts.
    """
    for reuse in range(config.sample_reuse):
        if config.n_minibatches == 1:
            yield sample
            continue
        sequences = answer_slices(sample.episode_sizes())
        order = np.random.default_rng([*seed, reuse]).permutation(len(sequences))
        numbers = range(sum(sample.num_answers_per_sample()))
        for part in np.array_split(order, config.n_minibatches):
            yield sample.select_answers([number for answer in part for number in numbers[sequences[answer]]])


def merge_stats(stats: Sequence[dict[str, float]], *, loss_name: str) -> dict[str, float]:
    """Means over the mini-batches that made a step; counts of tokens and skipped steps are added up."""
    values: dict[str, list[float]] = defaultdict(list)
    for mini_batch in stats:
        for name, value in mini_batch.items():
            values[loss_name if name == "loss" else name].append(value)
    return {name: sum(v) if name in _COUNTS else sum(v) / len(v) for name, v in values.items()}
