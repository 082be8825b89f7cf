"""Spans of all workers of a trial, on one clock, and the train step that each of them belongs to.

    timeline/*.jsonl ──times + offset of the clock line before──► spans ──by the master's steps──► those of a window

A step that was trained again, after a failure, is where it was trained last. Lines that a process left half written are
passed over.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from corral.experiments.trial.spans import STEPS, Clock, Span

_DECODER = msgspec.json.Decoder(Clock | Span)


def spans_of(folder: Path, steps: Collection[int] | None = None) -> list[Span]:
    """What all workers did, in the order in which it began; times are seconds of Unix time by the trial's clock.

    Args:
        folder: `TrialDirectory.timeline_path`.
        steps: as `overlapping`; None is all that is kept.
    """
    spans = [span for path in _paths(folder) for span in _read(path)]
    ordered = sorted(steps_in(spans).values(), key=lambda span: span.start_s)
    starts = [span.start_s for span in ordered]
    found = [span if span.step is not None else _in_step(span, ordered, starts) for span in spans]
    found.sort(key=lambda span: span.start_s)
    return found if steps is None else overlapping(found, steps)


def overlapping(spans: Sequence[Span], steps: Collection[int]) -> list[Span]:
    """Of some spans those which overlap the time from the first of these steps to the last one."""
    wanted = [span for step, span in steps_in(spans).items() if min(steps) <= step <= max(steps)]
    if not wanted:
        return []
    start_s, end_s = min(span.start_s for span in wanted), max(span.end_s for span in wanted)
    return [span for span in spans if span.end_s > start_s and span.start_s < end_s]


def steps_in(spans: Sequence[Span]) -> Mapping[int, Span]:
    """The steps themselves, by number."""
    of_steps = sorted((span for span in spans if span.lane == STEPS), key=lambda span: span.start_s)
    return {span.step: span for span in of_steps if span.step is not None}


def _paths(folder: Path) -> list[Path]:
    """Older halves first."""
    return sorted(folder.glob("*.jsonl"), key=lambda path: (not path.stem.endswith(".1"), path.name))


def _read(path: Path) -> Iterator[Span]:
    clock: Clock | None = None
    for line in path.read_bytes().splitlines():
        try:
            said = _DECODER.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(said, Clock):
            clock = said
        elif clock is not None:
            yield msgspec.structs.replace(
                said,
                start_s=said.start_s + clock.offset_s,
                end_s=said.end_s + clock.offset_s,
                worker=clock.worker,
                attempt=clock.attempt,
                incarnation=clock.incarnation,
            )


def _in_step(span: Span, steps: Sequence[Span], starts: Sequence[float]) -> Span:
    at = bisect_right(starts, span.start_s) - 1
    if at < 0 or span.start_s >= steps[at].end_s:
        return span
    return msgspec.structs.replace(span, step=steps[at].step)
