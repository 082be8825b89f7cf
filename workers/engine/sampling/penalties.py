"""What the tokens of an answer do to the logits of its next one: penalties, and stop tokens that come too early.

    output so far --of()--> counts [R, V] --apply_()--> logits --> the token that is drawn --count()--> counts

    logit <- logit - frequency_penalty * count - presence_penalty * [count > 0]
    logit <- logit / repetition_penalty, or * where it is negative, for tokens with count > 0
    logit <- -inf for the stop tokens of an answer of fewer than min_new_tokens

Counts are of the output of one request, without its prompt, as in SGLang 0.5.23. They are made of the output again
whenever the rows of the batch change, so an answer is the same whoever shares the batch, and after a retraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corral.workers.engine.to_device import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class PenalizedRow:
    """One row of a batch that has penalties."""

    row: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    stop_token_ids: frozenset[int]
    """What is impossible before `min_new_tokens`."""
    output_ids: Sequence[int]
    """What the answer has so far."""


class PenaltyBatch:
    """The penalties of R rows of a batch over a vocabulary of V tokens; holds two [R, V] tensors."""

    def __init__(self, rows: Sequence[PenalizedRow], *, vocab_size: int, device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return to_device(values, device, dtype=torch.float32).unsqueeze(-1)

        self._rows = to_device([row.row for row in rows], device)
        self._frequency = column([row.frequency_penalty for row in rows])
        self._presence = column([row.presence_penalty for row in rows])
        self._repetition = column([row.repetition_penalty for row in rows])
        self._min_new_tokens = column([row.min_new_tokens for row in rows])
        self._num_new_tokens = column([len(row.output_ids) for row in rows])
        self._counts = torch.zeros((len(rows), vocab_size), device=device)
        self._is_stop_token = torch.zeros((len(rows), vocab_size), dtype=torch.bool, device=device)
        for index, row in enumerate(rows):
            output_ids = to_device(row.output_ids, device, dtype=torch.int64)
            self._counts[index] = torch.bincount(output_ids, minlength=vocab_size)
            stop_token_ids = [token_id for token_id in row.stop_token_ids if 0 <= token_id < vocab_size]
            self._is_stop_token[index, stop_token_ids] = True

    def apply_(self, logits: Tensor) -> None:
        """Penalize the logits [B, V] float32 in place."""
        is_present = self._counts > 0
        penalized = logits[self._rows] - self._frequency * self._counts - self._presence * is_present
        scale = torch.where(is_present, self._repetition, 1.0)
        penalized = torch.where(penalized < 0, penalized * scale, penalized / scale)
        is_too_early = self._is_stop_token & (self._num_new_tokens < self._min_new_tokens)
        logits[self._rows] = penalized.masked_fill_(is_too_early, float("-inf"))

    def count(self, token_ids: Tensor) -> None:
        """Note the next token of every row of the batch, [B] int64."""
        self._counts.scatter_add_(1, token_ids[self._rows].unsqueeze(-1), torch.ones_like(self._frequency))
        self._num_new_tokens += 1
