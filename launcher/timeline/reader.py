"""Spans of all workers of a trial, on one clock, and the train step that each of them belongs to.

    timeline/*.jsonl ──times + offset of the clock line before──► spans ──by the master's steps──► those of a window

A step that was trained again, after a failure, is where it was trained last. Lines that a process left half written are
passed over.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.trial.directory import read_tail
from corral.experiments.trial.spans import PHASES, STEPS, Clock, Span, spans_path
from corral.experiments.trial.worker_record import MASTER

_DECODER = msgspec.json.Decoder(Clock | Span)


# Spans as the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.
#
#     start of a worker ──► process      lane ──► threads, as many as it has at the same time
#     span ──► complete event (X)        wait ──► arrow (s, f) from what its awaited worker ended last to its own end
#
# Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

_FIRST_LANES = (STEPS, PHASES)


def trace_of(spans: Sequence[Span]) -> dict[str, Any]:
    """The file's content; times are microseconds from the first of the spans."""
    zero_s = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    places: list[tuple[Span, dict[str, Any]]] = []
    for process, (name, of_process) in enumerate(_processes(spans), 1):
        events += [
            _named("process_name", name, process, 0),
            {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}},
        ]
        for thread, (lane, of_thread) in enumerate(_threads(of_process), 1):
            events.append(_named("thread_name", lane, process, thread))
            for span in of_thread:
                events.append(_event(span, zero_s, {"pid": process, "tid": thread}))
                places.append((span, events[-1]))
    return {"traceEvents": [*events, *_arrows(places)], "displayTimeUnit": "ms"}


def _processes(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Of each start of each worker; the master first."""
    by_start: defaultdict[tuple[str, int, str], list[Span]] = defaultdict(list)
    for span in spans:
        by_start[span.worker, span.attempt, span.incarnation].append(span)
    starts: defaultdict[str, int] = defaultdict(int)
    named = []
    for (worker, _, _), found in by_start.items():
        starts[worker] += 1
        named.append((worker if starts[worker] == 1 else f"{worker}, start {starts[worker]}", found))
    return sorted(named, key=lambda each: (not each[0].startswith("master"), each[0]))


def _threads(spans: Iterable[Span]) -> Iterator[tuple[str, list[Span]]]:
    """Each lane, cut into as many as are needed so that no two spans of one overlap.

    Of those in which a worker does one thing at a time spans overlap by what its clock was corrected by, and are cut.
    """
    by_lane: defaultdict[str, list[list[Span]]] = defaultdict(list)
    for span in spans:
        rows = by_lane[span.lane]
        free = next((row for row in rows if span.lane in _FIRST_LANES or row[-1].end_s <= span.start_s), None)
        if free is None:
            rows.append([span])
        else:
            start_s = max(span.start_s, free[-1].end_s)
            free.append(msgspec.structs.replace(span, start_s=start_s, end_s=max(span.end_s, start_s)))
    for lane, rows in sorted(by_lane.items(), key=lambda item: (item[0] not in _FIRST_LANES, item[0] == PHASES)):
        for number, row in enumerate(rows, 1):
            yield lane if len(rows) == 1 else f"{lane} {number}", row


def _named(what: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _event(span: Span, zero_s: float, place: Mapping[str, int]) -> dict[str, Any]:
    details = {
        "step": span.step,
        "about": span.about,
        "waits for": ", ".join(span.waits_for),
        "tokens": span.tokens,
        "seconds among ranks": span.among_ranks_s,
    }
    times = {"ts": _us(span.start_s - zero_s), "dur": _us(span.end_s - zero_s) - _us(span.start_s - zero_s)}
    args = {name: value for name, value in details.items() if value}
    return {"ph": "X", "name": span.name, "cat": span.lane, **times, **place, "args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _arrows(places: Sequence[tuple[Span, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Of each wait in the phases, from what ended last of whom it waited for."""
    ended: defaultdict[str, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
    for span, event in sorted(places, key=lambda place: place[0].end_s):
        if span.lane != STEPS:
            ended[span.worker].append((span.end_s, event))
    number = 0
    for span, event in places:
        if span.lane != PHASES:
            continue
        before = [_last(ended[worker], span.end_s) for worker in span.waits_for if ended[worker]]
        cause = max(filter(None, before), key=lambda found: found[0], default=None)
        if cause is None or cause[0] <= span.start_s:
            continue
        number += 1
        common = {"name": "waited for", "cat": "waits", "id": number}
        yield {"ph": "s", **common, **_end_of(cause[1])}
        yield {"ph": "f", "bp": "e", **common, **_end_of(event)}


def _last(ended: Sequence[tuple[float, dict[str, Any]]], before_s: float) -> tuple[float, dict[str, Any]] | None:
    at = bisect_right(ended, before_s, key=lambda each: each[0]) - 1
    return ended[at] if at >= 0 else None


def _end_of(event: Mapping[str, Any]) -> dict[str, int]:
    return {"pid": event["pid"], "tid": event["tid"], "ts": event["ts"] + event["dur"]}


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
            entry = _DECODER.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(entry, Clock):
            clock = entry
        elif clock is not None:
            start_s, end_s = entry.start_s + clock.offset_s, entry.end_s + clock.offset_s
            if end_s > window[0] and start_s < window[1]:
                yield msgspec.structs.replace(
                    entry,
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
