"""What requests share: the row of the cache that begins as a new one does, of a request that runs or that has ended.

    running     [prompt a | answer ...]  <--- a sibling: the same prompt
                [prompt b | answer ...]
    kept        [prompt c | answer]      <--- the next turn: prompt c, answer, and more
    free        [. . . . . .]

The shared positions are copied, and the rest is computed. Rows of ended requests are kept while nobody needs the room:
running requests take the first rows, and leave those behind them as they are. What other weights have computed is never
shared: an optimisation, which changes an answer by no more than the order of additions does.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from corral.workers.engine.attention import KVCache
from corral.workers.engine.requests import ActiveRequest

_LEAST_SHARED = 16  # fewer positions are computed about as fast as they are found


class SharedPrefixes:
    """Finds the row, copies what is shared, and keeps the rows of ended requests."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._kept: dict[int, ActiveRequest] = {}
        """By the row, behind those of running requests."""

    def share(self, admitted: Sequence[ActiveRequest], *, running: Sequence[ActiveRequest]) -> list[int]:
        """Give new requests, in the rows after those that run, what rows have of them; how many positions of each."""
        lengths, copies = list[int](), list[tuple[int, int]]()
        for target, active in enumerate(admitted, start=len(running)):
            length, row, source = self._longest(active, running)
            lengths.append(length)
            if source is not None:
                copies.append((row, target))
                first = active.request.experts_from
                if source.experts is not None and first is not None and first < length:
                    active.note_experts(source.experts.between(first, length), start=first)
            active.is_shareable = True
        self._cache.copy(copies, length=max(lengths))
        num_running = len(running) + len(admitted)
        self._kept = {row: active for row, active in self._kept.items() if row >= num_running}
        return lengths

    def keep(self, active: ActiveRequest, content: Sequence[Tensor] | None, *, row: int) -> None:
        """Leave what a request that has ended had in its row in the first row that is free now.

        Args:
            content: of its row, where another one has moved into that; None where it was this row.
        """
        if content is not None:
            self._cache.fill(row, content)
        self._kept[row] = active

    def resized(self) -> None:
        """The cache has become another: rows and positions beyond its own are gone."""
        num_rows, capacity = self._cache.num_rows, self._cache.capacity
        self._kept = {
            row: active for row, active in self._kept.items() if row < num_rows and active.num_tokens <= capacity
        }

    def forget(self) -> None:
        """The cache is given back, or other weights are taken over."""
        self._kept.clear()

    def _longest(self, asked: ActiveRequest, running: Sequence[ActiveRequest]) -> tuple[int, int, ActiveRequest | None]:
        """(positions, row, whose it is) of the longest prefix; all but the last token at most, which tells what comes
        next."""
        tokens = asked.tokens
        most = len(tokens) - 1
        if asked.request.input_logprobs_from is not None and asked.input_logprobs is None:
            most = min(most, asked.request.input_logprobs_from)
        best: tuple[int, int, ActiveRequest | None] = (0, 0, None)
        if most >= _LEAST_SHARED:
            for row, active in (*enumerate(running), *self._kept.items()):
                length = min(most, _common(active, tokens, asked)) if active.is_shareable else 0
                if length > max(best[0], _LEAST_SHARED - 1):
                    best = (length, row, active)
        return best


def _common(active: ActiveRequest, tokens: tuple[int, ...], asked: ActiveRequest) -> int:
    """How many of a row's positions hold what another request's first tokens make."""
    prompt, output_ids = active.request.prompt, active.output_ids
    length = _common_length(prompt, tokens)
    if length == len(prompt):
        # The newest token is in no cache yet.
        length += _common_length(tuple(output_ids[:-1]), tokens[length : length + len(output_ids)])
    if asked.request.experts_from is None:
        return length
    first, experts = asked.request.experts_from, active.experts
    # Who computed what is shared is to be told as well; a row that was read again says who did before.
    if experts is not None and not active.num_retractions and experts.know(first, length):
        return length
    return min(length, first)


def _common_length(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    if left == right[: len(left)]:
        return len(left)
    return next((index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(right))
