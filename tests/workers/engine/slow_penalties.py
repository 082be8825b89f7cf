"""Penalties by a loop over tokens in double precision: the reference of those of a batch."""

import math
from collections.abc import Collection, Sequence


def penalize(
    logits: Sequence[float],
    output_ids: Sequence[int],
    *,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    min_new_tokens: int = 0,
    stop_token_ids: Collection[int] = (),
) -> list[float]:
    """The logits of the token that follows `output_ids`."""
    penalized = list(logits)
    for token_id in sorted(set(output_ids)):
        value = penalized[token_id] - presence_penalty
        for _ in range(list(output_ids).count(token_id)):
            value -= frequency_penalty
        penalized[token_id] = value * repetition_penalty if value < 0 else value / repetition_penalty
    if len(output_ids) < min_new_tokens:
        for token_id in stop_token_ids:
            penalized[token_id] = -math.inf
    return penalized
