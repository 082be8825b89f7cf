"""Spans of all workers of a trial, on one clock, and the train step that each of them belongs to.

    timeline/*.jsonl ──times + offset of the clock line before──► spans ──by the master's steps──► those of a window

A step that was trained again, after a failure, is where it was trained last. Lines that a process left half written are
passed over.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from corral.experiments.trial.directory import read_tail
from corral.experiments.trial.spans import STEPS, Clock, Span, spans_path
from corral.experiments.trial.worker_record import MASTER

_DECODER = msgspec.json.Decoder(Clock | Span)


def steps_of(folder: Path, *, most_bytes: int | None = None) -> Mapping[int, Span]:
    """The train steps that are kept, by number, as the master has them."""
    paths = [spans_path(folder, MASTER, is_old=is_old) for is_old in (True, False)]
    return steps_in([span for path in paths if path.exists() for span in _read(path, most_bytes=most_bytes)])


def steps_in(spans: Sequence[Span]) -> Mapping[int, Span]:
    """The train steps among some spans, by number."""
    ordered = sorted((span for span in spans if span.lane == STEPS), key=lambda span: span.start_s)
    return {span.step: span for span in ordered if span.step is not None}


def spans_of(folder: Path, steps: Collection[int] | None = None, *, most_bytes: int | None = None) -> list[Span]:
    """What all workers did, in the order in which it began; times are seconds of Unix time by the trial's clock.

    Args:
        folder: `TrialDirectory.timeline_path`.
        steps: only what overlaps the time from the first of these steps to the last one, which are both kept; None is
            all that is kept.
        most_bytes: of the end of each file, where the last steps are enough.
    """
    known = steps_of(folder, most_bytes=most_bytes)
    wanted = [span for number, span in known.items() if steps is None or min(steps) <= number <= max(steps)]
    window = (-math.inf, math.inf)
    if steps is not None:
        window = min(span.start_s for span in wanted), max(span.end_s for span in wanted)
    ordered = sorted(known.values(), key=lambda span: span.start_s)
    starts = [span.start_s for span in ordered]
    spans = [span for path in folder.glob("*.jsonl") for span in _read(path, window, most_bytes=most_bytes)]
    others = [_in_step(span, ordered, starts) for span in spans if span.lane != STEPS]
    return sorted([*wanted, *others], key=lambda span: span.start_s)


def _read(
    path: Path, window: tuple[float, float] = (-math.inf, math.inf), *, most_bytes: int | None = None
) -> Iterator[Span]:
    clock: Clock | None = None
    data = path.read_bytes() if most_bytes is None else read_tail(path, most_bytes)
    for line in data.splitlines():
        try:
            said = _DECODER.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(said, Clock):
            clock = said
        elif clock is not None:
            start_s, end_s = said.start_s + clock.offset_s, said.end_s + clock.offset_s
            if end_s > window[0] and start_s < window[1]:
                yield msgspec.structs.replace(
                    said,
                    start_s=start_s,
                    end_s=end_s,
                    worker=clock.worker,
                    attempt=clock.attempt,
                    incarnation=clock.incarnation,
                )


def _in_step(span: Span, steps: Sequence[Span], starts: Sequence[float]) -> Span:
    at = bisect_right(starts, span.start_s) - 1
    if at < 0 or span.start_s >= steps[at].end_s:
        return span
    return msgspec.structs.replace(span, step=steps[at].step)
