"""Preference data: the answers to a prompt are pairs, each the preferred one and then the other.

    0:a  chosen rejected              is_chosen  True False
    0:b  chosen rejected chosen rejected         True False True False

A loss over pairs needs both in one micro-batch, so the engine keeps the answers to a prompt together; it counts pairs.
"""

import numpy as np
from torch import Tensor

from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample

IS_CHOSEN = "is_chosen"


def mark_pairs(sample: SequenceSample) -> SequenceSample:
    """The sample with `is_chosen`.

    Raises:
        ValueError: if a prompt has an odd number of answers.
    """
    for uid, count in zip(sample.uids, sample.num_answers_per_sample(), strict=True):
        if count % 2:
            raise ValueError(
                f"sample {uid!r} has {count} answers; pairs are a chosen and a rejected answer, one after the other"
            )
    num_answers = sum(sample.num_answers_per_sample())
    return sample.with_key(IS_CHOSEN, np.arange(num_answers) % 2 == 0)


def split_pairs(per_answer: Tensor, is_chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(chosen, rejected), each [pairs], of something per answer; the padding of a micro-batch has no pairs."""
    chosen = is_chosen.nonzero().squeeze(1)
    return per_answer[chosen], per_answer[chosen + 1]


def num_right(margins: Tensor) -> Tensor:
    """How many pairs are ranked as they should be; one whose answers are equal is half right, as a guess would be."""
    return (margins > 0).sum() + 0.5 * (margins == 0).sum()


def mean_over_pairs(context: ParallelContext, losses: Tensor, margins: Tensor) -> dict[str, float]:
    """Means of `loss`, `accuracy` and `margin` over the pairs of all ranks, and their `count`."""
    total = context.sum_over_ranks(
        {
            "count": float(len(margins)),
            "loss": float(losses.sum()),
            "accuracy": float(num_right(margins)),
            "margin": float(margins.sum()),
        }
    )
    count = total.pop("count")
    return {name: value / max(count, 1.0) for name, value in total.items()} | {"count": count}
