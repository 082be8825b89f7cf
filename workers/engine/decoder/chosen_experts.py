"""The experts that made an answer, row by row, as SGLang counts them.

    one pass:  [T, k] of each layer with experts ──experts_by_layer──► [T, layers, k]   0 in layers without experts
    a request: rows of prompt and answer, as tokens are read for the first time ──► ChosenExperts ──► its output

Row t is of token t: who computed it when it was read, and so made token t + 1. A request that is read again by later
weights keeps the rows that it has. The last token of an answer has none: nobody has read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Rows = npt.NDArray[np.int16]
"""[tokens, layers of the model, top_k]"""


def experts_by_layer(chosen: Sequence[Tensor], *, expert_layers: Sequence[int], num_layers: int) -> Rows:
    """The rows of one pass.

    Args:
        chosen: [T, k] of each of the `expert_layers`.
    """
    by_layer = torch.stack(tuple(chosen), dim=1).to(torch.int16).cpu().numpy()
    rows = np.zeros((by_layer.shape[0], num_layers, by_layer.shape[2]), np.int16)
    rows[:, list(expert_layers)] = by_layer
    return rows


class ChosenExperts:
    """The rows of one request, from the first token that is asked for."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._end = first
        self._pieces: list[Rows] = []

    def note(self, rows: Rows, *, start: int) -> None:
        """Take in the rows of the tokens from `start` on, but for those that are known."""
        assert start <= self._end or not self._pieces, "tokens are read in order"
        new = rows[max(0, self._end - start) :]
        if len(new):
            self._pieces.append(new)
            self._end += len(new)

    def before(self, end: int) -> Rows | None:
        """The rows of the tokens before `end`; None if nothing was read yet."""
        return np.concatenate(self._pieces)[: max(0, end - self._first)] if self._pieces else None
