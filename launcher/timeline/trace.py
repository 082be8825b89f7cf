"""Spans as the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

    start of a worker ──► process      lane ──► threads, as many as it has at the same time
    span ──► complete event (X)        wait ──► arrow (s, f) from what its awaited worker ended last to its own end

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from corral.experiments.trial.spans import PHASES, STEPS, Span

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
    told = {
        "step": span.step,
        "about": span.about,
        "waits for": ", ".join(span.waits_for),
        "tokens": span.tokens,
        "seconds among ranks": span.among_ranks_s,
    }
    times = {"ts": _us(span.start_s - zero_s), "dur": _us(span.end_s - zero_s) - _us(span.start_s - zero_s)}
    args = {name: value for name, value in told.items() if value}
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
