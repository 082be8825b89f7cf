"""Turns of all ways at one size ──► a table: tokens per second, beside the yardstick, peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.training.contender import Turn
from benchmarks.training.utilization import utilization

GB = 1e9
HEAD = ("way", "tokens/s", "tokens/CPU s", "ratio", "peak")


def render(
    turns: Mapping[str, Sequence[Turn]],
    *,
    num_tokens: int,
    yardstick: str,
    by_cpu: bool,
    flops: float = 0.0,
    peak: float | None = None,
) -> str:
    """A Markdown table with a row for each way, in the mapping's order.

    Args:
        turns: by way, one of each round; none if the device is too small for it.
        num_tokens: of one step.
        yardstick: the way that the others are divided by; the ratio is the median of those of the rounds.
        by_cpu: whether ratios are of CPU seconds, which a busy machine leaves alone, or of wall seconds.
        flops: of one step.
        peak: operations per second of the device; None leaves utilization out.
    """
    rows = [(*HEAD, "MFU") if peak else HEAD]
    for way, taken in turns.items():
        if not taken:
            rows.append((way, "out of memory", *[""] * (len(rows[0]) - 2)))
            continue
        wall = statistics.median(turn.wall_s for turn in taken)
        cpu = statistics.median(turn.cpu_s for turn in taken)
        pairs = zip(taken, turns[yardstick], strict=False)
        ratios = [seconds(other, by_cpu) / seconds(own, by_cpu) for own, other in pairs]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
        memory = max(turn.peak_bytes for turn in taken) / GB
        cells = (way, f"{num_tokens / wall:,.0f}", f"{num_tokens / cpu:,.0f}", ratio, f"{memory:.2f} GB")
        rows.append((*cells, f"{utilization(flops, seconds=wall, peak=peak):.1%}") if peak else cells)
    return markdown(rows)


def seconds(turn: Turn, by_cpu: bool) -> float:
    """Of one step, by one of the clocks."""
    return turn.cpu_s if by_cpu else turn.wall_s


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
