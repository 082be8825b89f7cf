"""Prompts of newly admitted requests -> cache rows and the logits of their next token.

    admitted -> identical contexts together -> rectangles of similar length (<= PROMPT_TOKENS) -> logits [N, V]

A group samples n answers to one prompt: it is computed once, and its keys and values go to n rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corral.scheduling.memory.server import PROMPT_TOKENS
from corral.workers.engine.attention import KVCache, PromptAttention
from corral.workers.engine.decoder import Decoder
from corral.workers.engine.requests import ActiveRequest
from corral.workers.engine.sampling import to_device

_INPUT_LOGPROB_BLOCK = 1024  # positions whose logits [block, V] exist at once


class Prefill:
    """Computes whole contexts into the cache."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache

    def run(self, admitted: Sequence[ActiveRequest], *, first_row: int) -> Tensor:
        """Logits [len(admitted), V] float32 of each request's next token; the cache rows are `first_row` and on."""
        offsets_by_context: dict[tuple[int, ...], list[int]] = {}
        for offset, active in enumerate(admitted):
            offsets_by_context.setdefault(active.tokens, []).append(offset)
        logits = torch.empty((len(admitted), self._decoder.vocab_size), device=self._decoder.device)
        for contexts in _rectangles(offsets_by_context):
            self._run_rectangle(contexts, offsets_by_context, admitted, logits, first_row=first_row)
        return logits

    def _run_rectangle(
        self,
        contexts: Sequence[tuple[int, ...]],
        offsets_by_context: dict[tuple[int, ...], list[int]],
        admitted: Sequence[ActiveRequest],
        logits: Tensor,
        *,
        first_row: int,
    ) -> None:
        device = self._decoder.device
        width = max(len(context) for context in contexts)
        offsets = to_device([o for context in contexts for o in offsets_by_context[context]], device)
        sources = [index for index, context in enumerate(contexts) for _ in offsets_by_context[context]]
        source_index = to_device(sources, device)
        padded = [[*context, *[0] * (width - len(context))] for context in contexts]
        self._decoder.reserve_positions(width)
        attend = PromptAttention(
            cache=self._cache,
            num_prompts=len(contexts),
            rows=offsets + first_row,
            prompt_of_row=source_index,
            softmax_scale=self._decoder.softmax_scale,
        )
        asked = any(admitted[o].experts is not None for context in contexts for o in offsets_by_context[context])
        chosen: list[Tensor] | None = [] if asked else None
        hidden = self._decoder.hidden_states(
            to_device(padded, device).view(-1),
            torch.arange(width, device=device).repeat(len(contexts)),
            attend,
            chosen=chosen,
        ).view(len(contexts), width, -1)
        last = to_device([len(context) - 1 for context in contexts], device)
        last_logits = self._decoder.logits(hidden[torch.arange(len(contexts), device=device), last])
        logits[offsets] = last_logits[source_index]
        rows = None if chosen is None else self._decoder.expert_rows(chosen)
        for index, context in enumerate(contexts):
            for copy, offset in enumerate(offsets_by_context[context]):
                self._note(admitted[offset], hidden[index], is_copy=copy > 0)
                if rows is not None:
                    first = index * width
                    admitted[offset].note_experts(rows[first : first + len(context)], start=0)

    def _note(self, active: ActiveRequest, hidden: Tensor, *, is_copy: bool) -> None:
        """Record what only the first prefill of a request tells. hidden: [width, hidden]."""
        prompt = active.request.prompt
        if is_copy and not active.output_ids:
            active.cached_tokens = len(prompt)
        start = active.request.input_logprobs_from
        if start is None or active.input_logprobs is not None:
            return
        values: list[float | None] = [None] if start < len(prompt) else []
        for begin in range(start, len(prompt) - 1, _INPUT_LOGPROB_BLOCK):
            end = min(begin + _INPUT_LOGPROB_BLOCK, len(prompt) - 1)
            logprobs = torch.log_softmax(self._decoder.logits(hidden[begin:end]), dim=-1)
            targets = to_device(prompt[begin + 1 : end + 1], hidden.device).unsqueeze(-1)
            values.extend(logprobs.gather(-1, targets).squeeze(-1).tolist())
        active.input_logprobs = tuple(values)


def _rectangles(contexts: dict[tuple[int, ...], list[int]]) -> list[list[tuple[int, ...]]]:
    """Contexts sorted by length, cut where padding them to the longest would pass the limit."""
    rectangles: list[list[tuple[int, ...]]] = []
    for context in sorted(contexts, key=len):
        if rectangles and (len(rectangles[-1]) + 1) * len(context) <= PROMPT_TOKENS:
            rectangles[-1].append(context)
        else:
            rectangles.append([context])
    return rectangles
