"""Contexts of newly admitted requests -> cache rows and the logits of their next token.

    admitted -> identical contexts together -> what their rows lack, PROMPT_TOKENS at a time -> logits [N, V]

A group samples n answers to one prompt: it is computed once, and its keys and values go to n rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from corral.scheduling.memory.gpu import PROMPT_TOKENS
from corral.workers.engine.attention import ContextAttention, KVCache, Reach
from corral.workers.engine.decoder import Decoder
from corral.workers.engine.requests import ActiveRequest
from corral.workers.engine.sampling import to_device

_INPUT_LOGPROB_BLOCK = 1024  # positions whose logits [block, V] exist at once


# What requests share: the row of the cache that begins as a new one does, of a request that runs or that has ended.
#
#     running     [prompt a | answer ...]  <--- a sibling: the same prompt
#                 [prompt b | answer ...]
#     kept        [prompt c | answer]      <--- the next turn: prompt c, answer, and more
#     free        [. . . . . .]
#
# The shared positions are copied, and the rest is computed. Rows of ended requests are kept while nobody needs the
# room: running requests take the first rows, and leave those behind them as they are. What other weights have computed
# is never shared: an optimisation, which changes an answer by no more than the order of additions does.

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
    # The version that computed the shared part is reported as well; a row that was read again carries it.
    if experts is not None and not active.num_retractions and experts.know(first, length):
        return length
    return min(length, first)


def _common_length(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    if left == right[: len(left)]:
        return len(left)
    return next((index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(right))


class Prefill:
    """Computes contexts into the cache."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache

    def run(self, admitted: Sequence[ActiveRequest], *, first_row: int, shared: Sequence[int]) -> Tensor:
        """Logits [len(admitted), V] float32 of each request's next token; the cache rows are `first_row` and on.

        Args:
            shared: how many positions the row of each has already.
        """
        offsets_by_context: dict[object, list[int]] = {}
        for offset, active in enumerate(admitted):
            asked = active.request.input_logprobs_from, active.request.experts_from, active.num_retractions
            offsets_by_context.setdefault((active.tokens, asked), []).append(offset)
        groups = list(offsets_by_context.values())
        reaches = [Reach(first_row + first, shared[first], admitted[first].num_tokens) for first, *_ in groups]
        logits = torch.cat([self._compute(portion, admitted, first_row) for portion in _portions(reaches)])
        copies = [(first, offset) for first, *others in groups for offset in others]
        for first, offset in copies:
            _note_copy(admitted[first], admitted[offset])
        self._cache.copy(
            [(first_row + first, first_row + offset) for first, offset in copies],
            length=max(reach.stop for reach in reaches),
        )
        index_by_offset = {offset: index for index, offsets in enumerate(groups) for offset in offsets}
        return logits[to_device([index_by_offset[offset] for offset in range(len(admitted))], logits.device)]

    def _compute(self, reaches: Sequence[Reach], admitted: Sequence[ActiveRequest], first_row: int) -> Tensor:
        """[len(reaches), V] float32 of what comes after each."""
        device, decoder = self._decoder.device, self._decoder
        requests = [admitted[reach.row - first_row] for reach in reaches]
        tokens = [
            token for active, reach in zip(requests, reaches, strict=True) for token in active.tokens[reach.start :]
        ]
        positions = [position for reach in reaches for position in range(reach.start, reach.stop)]
        decoder.reserve_positions(max(reach.stop for reach in reaches))
        chosen: list[Tensor] | None = [] if any(active.experts is not None for active in requests) else None
        hidden = decoder.hidden_states(
            to_device(tokens, device),
            to_device(positions, device),
            ContextAttention(cache=self._cache, reaches=reaches, softmax_scale=decoder.softmax_scale),
            chosen=chosen,
        )
        rows = None if chosen is None else decoder.expert_rows(chosen)
        ends, begin = list[int](), 0
        for active, reach in zip(requests, reaches, strict=True):
            end = begin + reach.stop - reach.start
            if not active.output_ids:
                active.cached_tokens = min(reach.start, len(active.request.prompt))
            self._note_logprobs(active, hidden[begin:end], start=reach.start)
            if rows is not None:
                active.note_experts(rows[begin:end], start=reach.start)
            ends.append(end - 1)
            begin = end
        return decoder.logits(hidden[to_device(ends, device)])

    def _note_logprobs(self, active: ActiveRequest, hidden: Tensor, *, start: int) -> None:
        """Record those of the prompt, which only the first prefill of a request tells. hidden: of `start` and on."""
        prompt, asked = active.request.prompt, active.request.input_logprobs_from
        if asked is None or active.input_logprobs is not None:
            return
        values: list[float | None] = [None] if asked < len(prompt) else []
        for begin in range(asked, len(prompt) - 1, _INPUT_LOGPROB_BLOCK):
            end = min(begin + _INPUT_LOGPROB_BLOCK, len(prompt) - 1)
            logprobs = torch.log_softmax(self._decoder.logits(hidden[begin - start : end - start]), dim=-1)
            targets = to_device(prompt[begin + 1 : end + 1], hidden.device).unsqueeze(-1)
            values.extend(logprobs.gather(-1, targets).squeeze(-1).tolist())
        active.input_logprobs = tuple(values)


def _note_copy(computed: ActiveRequest, copy: ActiveRequest) -> None:
    """Both have asked for the same."""
    copy.input_logprobs = copy.input_logprobs or computed.input_logprobs
    if not copy.output_ids:
        copy.cached_tokens = len(copy.request.prompt)
    if computed.experts is not None and copy.request.experts_from is not None:
        first = copy.request.experts_from
        copy.note_experts(computed.experts.between(first, computed.num_tokens), start=first)


def _portions(reaches: Sequence[Reach]) -> Iterator[list[Reach]]:
    """In their order, cut where they would pass the limit."""
    portion, num_tokens = list[Reach](), 0
    for reach in reaches:
        size = reach.stop - reach.start
        if portion and num_tokens + size > PROMPT_TOKENS:
            yield portion
            portion, num_tokens = [], 0
        portion.append(reach)
        num_tokens += size
    yield portion
