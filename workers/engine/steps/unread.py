"""Tokens on their way from the device to the host: a step's tokens are read while the next step computes.

    device   | step n            | step n+1          | step n+2
             |        tokens of n ==> pinned memory, event
    host     launch n+1, wait for the event of n, end and admit requests, launch n+2, ...

On a CPU there is no way to go: they are read where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from corral.workers.engine.decoder.chosen_experts import Rows
from corral.workers.engine.requests import ActiveRequest
from corral.workers.engine.sampling.sampling import SampledTokens


@dataclass(frozen=True, slots=True)
class StepExperts:
    """Who computed the newest tokens of a step's rows."""

    rows: Rows
    lengths: Sequence[int]
    """Of the rows, up to these tokens."""

    def note(self, active: ActiveRequest, *, row: int) -> None:
        active.note_experts(self.rows[row : row + 1], start=self.lengths[row] - 1)


class ReadToken(NamedTuple):
    """One token of one request; a tuple, since one is made for every token."""

    row: int
    """Of the step; the request may have moved since."""
    active: ActiveRequest
    token_id: int
    logprob: float
    original_logprob: float | None
    """None where it was not asked for."""


class UnreadTokens:
    """What one step has sampled for its requests."""

    def __init__(
        self,
        sampled: SampledTokens,
        requests: Sequence[ActiveRequest],
        *,
        version: str,
        experts: StepExperts | None = None,
    ) -> None:
        """Begin to copy; the tensors may be overwritten by whatever the device is told next.

        Args:
            requests: those that the tokens are for, in the order of the rows; each has one unread token more.
            version: of the weights that made them.
        """
        self.version = version
        self.experts = experts
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
        for row, (active, token_id, logprob) in enumerate(tokens):
            original_logprob = next(original) if active.request.wants_original_logprobs else None
            if not active.has_ended:
                active.num_unread -= 1
                yield ReadToken(row, active, token_id, logprob, original_logprob)


def _host_copy(tensor: Tensor | None) -> Tensor | None:
    """Into pinned memory, without waiting for the device; a tensor on a CPU is its own."""
    if tensor is None or not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
