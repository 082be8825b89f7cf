"""The state of each running row for a decode step, on the device, where every step leaves it for the next one.

    row:        0   1   2   .   .         requests --join--> a row each, with what the host knows of them
    token      17   4  88   .   .  <--+
    position    9  31  12   .   .  <--+-- take: what was sampled, one position further
    start      s0  s1  s2   .   .  --+
    gamma      g0  g1  g2   .   .  --+--> uniforms of the tokens that come next

The host writes when requests join or rows move, and reads nothing: it knows every position without asking. The tokens
it gets another way, while the next step computes; so that begins before the tokens of the one before are known there.

    device   | step n            | step n+1          | step n+2
             |        tokens of n ==> pinned memory, event
    host     launch n+1, wait for the event of n, end and admit requests, launch n+2, ...

On a CPU there is no way to go: they are read where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from corral.workers.engine.requests import ActiveRequest
from corral.workers.engine.sampling import SampledTokens, to_device, token_uniforms

_UNIFORMS_AHEAD = 16  # steps whose numbers are drawn at once: twenty small operations, which cost the same for one


class DecodeRows:
    """The newest token of every row, which is in no cache yet, where it stands, and its random numbers to come."""

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self._table = torch.zeros((4, max_rows), dtype=torch.int64, device=device)
        self._token_ids, self._positions, self._starts, self._gammas = self._table.unbind()
        self._uniforms: Tensor | None = None
        self._uniforms_of = (0, 0)
        self._num_taken = 0

    def newest(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Token ids of the rows from 0 on, and where they belong in the cache; both [num_rows] int64."""
        return self._token_ids[:num_rows], self._positions[:num_rows]

    def join(self, requests: Sequence[ActiveRequest], *, first_row: int) -> None:
        """Rows of requests whose known tokens are all in the cache, and whose next one is about to be sampled."""
        columns = [[0, active.num_tokens - 1, *active.uniforms.on_device] for active in requests]
        self._table[:, first_row : first_row + len(requests)] = to_device(columns, self._table.device).t()
        self._uniforms = None

    def move(self, *, source: int, target: int) -> None:
        """Put row `source` in the place of `target`."""
        self._table[:, target] = self._table[:, source]
        self._uniforms = None

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


ReadToken = tuple[ActiveRequest, int, float, float | None]
"""Token id and log-probability of one token of a request; its original log-probability where that was asked for."""


class UnreadTokens:
    """The tokens that one step has sampled for its requests."""

    def __init__(self, sampled: SampledTokens, requests: Sequence[ActiveRequest], *, version: str) -> None:
        """Begin to copy; the tensors may be overwritten by the device's next operation.

        Args:
            requests: those that the tokens are for, in the order of the rows; each has one unread token more.
            version: of the weights that made them.
        """
        self.version = version
        self._requests = tuple(requests)
        self._tensors = [_host_copy(tensor) for tensor in sampled]
        self._arrived = torch.cuda.Event() if sampled.token_ids.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()
        for active in requests:
            active.num_unread += 1

    def read(self) -> Iterator[ReadToken]:
        """The tokens, when they have arrived, but for those of requests that have ended meanwhile."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids, logprobs, originals = self._tensors
        assert token_ids is not None and logprobs is not None
        original = iter(() if originals is None else originals.tolist())
        tokens = zip(self._requests, token_ids.tolist(), logprobs.tolist(), strict=True)
        for active, token_id, logprob in tokens:
            original_logprob = next(original) if active.request.wants_original_logprobs else None
            if not active.has_ended:
                active.num_unread -= 1
                yield active, token_id, logprob, original_logprob


def _host_copy(tensor: Tensor | None) -> Tensor | None:
    """Into pinned memory, without waiting for the device; a tensor on a CPU is its own."""
    if tensor is None or not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
