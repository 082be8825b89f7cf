"""metrics.jsonl: one line a train step or evaluation, for people, reports and the progress line.

{"time": 1700000000.5, "step": 12, "epoch": 1, "ppo/loss": 0.01, "time/step_s": 0.8}
"""

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from corral.workers.master.sequence_buffer import BufferedSample


class MetricsWriter:
    """Appends to the files of one trainer epoch."""

    def __init__(self, metrics_path: Path, trajectories_path: Path, *, epoch: int) -> None:
        self._metrics_path = metrics_path
        self._trajectories_path = trajectories_path
        self._epoch = epoch

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step; numbers that are not finite are written as null, which JSON has."""
        finite = {key: value if math.isfinite(value) else None for key, value in sorted(values.items())}
        _append(self._metrics_path, [{"time": time.time(), "step": step, "epoch": self._epoch, **finite}])

    def record(self, step: int, samples: Iterable[BufferedSample]) -> None:
        """Add which versions made the tokens that train step `step` (from version step - 1 to step) consumed."""
        _append(
            self._trajectories_path,
            [
                {
                    "step": step,
                    "epoch": self._epoch,
                    "uid": sample.uid,
                    "order": sample.order,
                    "versions": [str(version) for version in sorted(sample.versions)],
                }
                for sample in samples
                if sample.versions
            ],
        )


def _append(path: Path, lines: list[dict[str, Any]]) -> None:
    if lines:
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
