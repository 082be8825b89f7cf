"""timeline/ -> what the page shows of it: where the time of the last steps went, and each span of the very last."""

from pathlib import Path
from typing import Any

from corral.experiments.trial.spans import STEPS
from corral.launcher.timeline.reader import spans_of, steps_of
from corral.launcher.timeline.sentence import LATEST_STEPS, said_of

_DRAWN_STEPS = 4
_MOST_SPANS = 1_500
_TAIL_BYTES = 1 << 20  # of each worker's file, which has the last steps


def timeline_of(folder: Path) -> dict[str, Any] | None:
    """Sentences about the last steps, and the longest spans of a few of them; None where no timeline is kept."""
    if not (there := sorted(steps_of(folder, most_bytes=_TAIL_BYTES))):
        return None
    spans = spans_of(folder, there[-LATEST_STEPS:], most_bytes=_TAIL_BYTES)
    drawn = [span for span in spans if span.step in there[-_DRAWN_STEPS:]]
    longest = sorted(drawn, key=lambda span: -span.seconds)[:_MOST_SPANS]
    begin_s = min(span.start_s for span in drawn)
    return {
        "said": said_of(spans),
        "first": there[-_DRAWN_STEPS:][0],
        "last": there[-1],
        "left_out": len(drawn) - len(longest),
        "spans": [
            {
                "row": f"{span.worker} {span.lane}",
                "kind": STEPS if span.lane == STEPS else span.name,
                "what": " ".join(filter(None, [span.name, span.about, *span.waits_for])),
                "start_s": round(span.start_s - begin_s, 4),
                "seconds": round(span.seconds, 4),
            }
            for span in sorted(longest, key=lambda span: (span.worker, span.lane, span.start_s))
        ],
    }
