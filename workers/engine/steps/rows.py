"""What a decode step needs of each running row, on the device, where every step leaves it for the next one.

    row:        0   1   2   .   .         requests --join--> a row each, with what the host knows of them
    token      17   4  88   .   .  <--+
    position    9  31  12   .   .  <--+-- take: what was sampled, one position further
    start      s0  s1  s2   .   .  --+
    gamma      g0  g1  g2   .   .  --+--> uniforms of the tokens that come next

The host writes when requests join or rows move, and reads nothing: it knows every position without asking, and gets
the tokens another way (unread.py). So a step begins before the tokens of the one before are known on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corral.workers.engine.requests import ActiveRequest
from corral.workers.engine.sampling.uniforms import token_uniforms
from corral.workers.engine.to_device import to_device

_UNIFORMS_AHEAD = 16  # steps whose numbers are drawn at once: twenty small operations, which cost the same for one


class DecodeRows:
    """The newest token of every row, which is in no cache yet, where it stands, and its random numbers to come."""

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self._table = torch.zeros((4, max_rows), dtype=torch.int64, device=device)
        self.max_rows = max_rows
        self._token_ids, self._positions, self._starts, self._gammas = self._table.unbind()
        self._uniforms: Tensor | None = None
        self._uniforms_of = (0, 0)
        self._num_taken = 0

    def token_ids(self, num_rows: int) -> Tensor:
        """[num_rows] int64, of the rows from 0 on; the same memory whenever it is asked for."""
        return self._token_ids[:num_rows]

    def positions(self, num_rows: int) -> Tensor:
        """[num_rows] int64, where these tokens belong in the cache; the same memory whenever it is asked for."""
        return self._positions[:num_rows]

    def join(self, requests: Sequence[ActiveRequest], *, first_row: int) -> None:
        """Rows of requests whose known tokens are all in the cache, and whose next one is about to be sampled."""
        columns = [[0, active.num_tokens - 1, *active.uniforms.on_device] for active in requests]
        self._table[:, first_row : first_row + len(requests)] = to_device(columns, self._table.device).t()
        self._uniforms = None

    def move(self, *, source: int, target: int) -> None:
        """Put row `source` in the place of `target`."""
        self._table[:, target] = self._table[:, source]
        self._uniforms = None

    def vacate(self, first_row: int) -> None:
        """Nobody has the rows from here on; they stand at position 0, which every cache has."""
        self._table[:, first_row:] = 0

    def next_uniforms(self, num_rows: int, *, first_row: int = 0) -> Tensor:
        """[num_rows] float32 in [0, 1], of the tokens that are sampled now."""
        rows = (first_row, num_rows)
        if self._uniforms is None or self._uniforms_of != rows or self._num_taken == _UNIFORMS_AHEAD:
            asked = slice(first_row, first_row + num_rows)
            ahead = torch.arange(1, _UNIFORMS_AHEAD + 1, device=self._table.device).unsqueeze(-1)
            positions = self._positions[asked] + ahead
            self._uniforms = token_uniforms(self._starts[asked], self._gammas[asked], positions).float()
            self._uniforms_of, self._num_taken = rows, 0
        return self._uniforms[self._num_taken]

    def take(self, token_ids: Tensor, *, first_row: int = 0) -> None:
        """Make what was sampled, [N] int64, the newest tokens of the rows from `first_row` on."""
        rows = slice(first_row, first_row + token_ids.shape[0])
        self._token_ids[rows].copy_(token_ids)
        self._positions[rows].add_(1)
        self._num_taken += 1
