"""How the newest tokens of all rows become logits of the next ones: DecodeRows, KVCache --StepRunner--> logits [B, V].

    PlainSteps       B rows, in spans of like length                           any shape, launched anew
    CapturedSteps    rows and length rounded up, over memory that stays        few shapes, each captured once, replayed

The rows that rounding adds are free ones: they write a token that nobody reads into position 0 of free rows of the
cache, which whoever gets such a row overwrites. What length it adds is masked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from corral.workers.engine.decoder.attention import TokenAttention
from corral.workers.engine.decoder.cache import KVCache, power_of_two_at_least
from corral.workers.engine.decoder.decoder import Decoder
from corral.workers.engine.decoder.row_spans import RowSpan, RowSpans
from corral.workers.engine.steps.graphs import Graphs, graphs_of
from corral.workers.engine.steps.rows import DecodeRows

logger = logging.getLogger(__name__)

_SHORTEST = 64  # positions; below, a step costs the same


class StepRunner(Protocol):
    def __call__(self, lengths: Sequence[int], chosen: list[Tensor] | None) -> Tensor:
        """Write the newest token of each row into the cache, and give what comes next.

        Args:
            lengths: tokens of each row from row 0 on, with the newest; the cache has room for them.
            chosen: the experts of each layer that has some are appended, [B, k]; None where nobody asks.

        Returns:
            [B, V] float32, which may be overwritten, and is overwritten by the next call.
        """


def step_runner(
    decoder: Decoder, cache: KVCache, rows: DecodeRows, spans: RowSpans, *, captured_positions: int | None
) -> StepRunner:
    """What captures steps of so many positions at most, see `CapturedSteps`, which may refuse; None captures none."""
    if captured_positions is None:
        return PlainSteps(decoder, cache, rows, spans)
    new_graphs = graphs_of(decoder.device)
    return CapturedSteps(decoder, cache, rows, max_positions=captured_positions, new_graphs=new_graphs)


@dataclass(frozen=True, slots=True)
class PlainSteps:
    """Every step as it is."""

    decoder: Decoder
    cache: KVCache
    rows: DecodeRows
    spans: RowSpans

    def __call__(self, lengths: Sequence[int], chosen: list[Tensor] | None) -> Tensor:
        self.decoder.reserve_positions(max(lengths))
        return _logits(self.decoder, self.cache, self.rows, self.spans.of(lengths), chosen)


def _logits(
    decoder: Decoder, cache: KVCache, rows: DecodeRows, spans: Sequence[RowSpan], chosen: list[Tensor] | None
) -> Tensor:
    """[B, V] of the B rows that the spans hold."""
    num_rows = spans[-1].stop
    positions = rows.positions(num_rows)
    attend = TokenAttention(
        cache, positions=positions, spans=spans, dtype=decoder.dtype, softmax_scale=decoder.softmax_scale
    )
    return decoder.logits(decoder.hidden_states(rows.token_ids(num_rows), positions, attend, chosen=chosen))


class CapturedSteps:
    """Steps of few shapes. A step may be computed twice with the same outcome, which capturing needs.

    What was captured reads the very tensors that were there, so it is thrown away when weights, rotary table or cache
    are replaced by others.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rows: DecodeRows,
        *,
        max_positions: int,
        new_graphs: Callable[[], Graphs],
    ) -> None:
        """
        Args:
            max_positions: that a row may ever have; the rotary table is made for all of them.
            new_graphs: makes what captures, with nothing captured.

        Raises:
            ValueError: if the decoder has layers that ask the host.
        """
        if decoder.expert_layers:
            raise ValueError(
                f"layers {', '.join(map(str, decoder.expert_layers[:3]))} ask the host which experts their tokens have "
                "chosen, so no step of this model can be a CUDA graph; set engine.cuda_graphs to false"
            )
        self._decoder, self._cache, self._rows = decoder, cache, rows
        self._max_positions = max_positions
        self._logits = torch.empty((rows.max_rows, decoder.vocab_size), device=decoder.device)
        self._new_graphs = new_graphs
        self._graphs = new_graphs()
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._replaced = (0, 0)

    def __call__(self, lengths: Sequence[int], chosen: list[Tensor] | None) -> Tensor:
        assert chosen is None, "there are no experts"
        self._decoder.reserve_positions(self._max_positions)
        self._forget_what_is_replaced()
        shape = self._shape(len(lengths), max(lengths))
        if shape not in self._replays:
            self._replays[shape] = self._capture(*shape)
        self._replays[shape]()
        return self._logits[: len(lengths)]

    def _shape(self, num_rows: int, longest: int) -> tuple[int, int]:
        """(rows, positions), powers of two, or as many as there are."""
        rows = min(power_of_two_at_least(num_rows), self._cache.num_rows)
        return rows, min(power_of_two_at_least(max(longest, _SHORTEST)), self._cache.capacity)

    def _capture(self, num_rows: int, length: int) -> Callable[[], None]:
        # Lengths from 0 on: the mask is part of what is captured, so it is there for rows of one length, too.
        spans = (RowSpan(0, num_rows, shortest=0, longest=length),)

        def launch() -> None:
            self._logits[:num_rows] = _logits(self._decoder, self._cache, self._rows, spans, None)

        begun = time.monotonic()
        replay = self._graphs.capture(launch)
        logger.info(
            "the step of %d rows and %d positions was captured in %.2f s; the graphs hold %.0f MiB",
            num_rows,
            length,
            time.monotonic() - begun,
            self._graphs.size_bytes / 2**20,
        )
        return replay

    def _forget_what_is_replaced(self) -> None:
        replaced = (self._decoder.num_replacements, self._cache.num_replacements)
        if replaced != self._replaced and self._replays:
            self._replays.clear()
            self._graphs.close()
            self._graphs = self._new_graphs()
        self._replaced = replaced
