"""metrics.jsonl: one line a train step or evaluation, for people, reports and the progress line.

{"time": 1700000000.5, "step": 12, "epoch": 1, "ppo/loss": 0.01, "time/step_s": 0.8}
"""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path


class MetricsWriter:
    """Appends to metrics.jsonl; a step that was trained again after a failure has a further line with a higher epoch."""

    def __init__(self, path: Path, *, epoch: int) -> None:
        self._path = path
        self._epoch = epoch

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step; numbers that are not finite are written as null, which JSON has."""
        finite = {key: value if math.isfinite(value) else None for key, value in sorted(values.items())}
        line = json.dumps({"time": time.time(), "step": step, "epoch": self._epoch, **finite})
        with self._path.open("a") as file:
            file.write(line + "\n")
