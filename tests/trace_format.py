"""What the Trace Event Format asks of a file, as far as we write it."""

import json
from collections import defaultdict
from typing import Any


def check_format(content: dict[str, Any]) -> None:
    """By https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    events = json.loads(json.dumps(content))["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    lanes, arrows = defaultdict(list), defaultdict(list)
    for event in events:
        assert event["ph"] in "MXsf" and event["pid"] in processes
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], int) and event["ts"] >= 0 and (event["pid"], event["tid"]) in named
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        else:
            arrows[event["id"]].append((event["ph"], event["ts"]))
    for spans in lanes.values():
        ordered = sorted(spans)
        assert all(before[1] <= after[0] for before, after in zip(ordered, ordered[1:], strict=False)), "one lane"
    for ends in arrows.values():
        assert [phase for phase, _ in ends] == ["s", "f"] and ends[0][1] <= ends[1][1], "one arrow, forwards"
