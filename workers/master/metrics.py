"""metrics.jsonl and trajectories.jsonl: one line per train step or evaluation, one per sample trained on.

    {"time": 1700000000.5, "step": 12, "trainer_epoch": 1, "ppo/loss": 0.01, "time/train_s": 0.8}
    {"step": 12, "trainer_epoch": 1, "uid": "0:problem-17", "order": 93, "versions": ["1.10", "1.11"]}

    train step ──add──► lines ──seal──► fsync, sizes ──in the manifest of──► commit
                          ▲                                                    │ recovery
                          └──────── cut back to the commit's sizes ◄───────────┘

Lines of a step are written before the commit that covers it, and a new epoch cuts off what no commit covers. So the
files hold the steps of the present lineage, each once: nothing is missing, and what was taken back is gone. A trainer
epoch is a start of the ranks that train; passes over the data are counted as `data/epoch`.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from corral.workers.master.sample_source import BufferedSample

logger = logging.getLogger(__name__)


class StepLines:
    """Appends to the files of one trainer epoch; every method does file I/O."""

    def __init__(self, metrics_path: Path, trajectories_path: Path, *, epoch: int) -> None:
        self._paths = {"metrics": metrics_path, "trajectories": trajectories_path}
        self._epoch = epoch

    def cut_back(self, sizes: Mapping[str, int]) -> None:
        """Leave what the commit covers that this epoch continues; what was written after it was taken back."""
        for name, path in self._paths.items():
            _cut(path, sizes.get(name, 0))

    def add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step; numbers that are not finite are written as null, which JSON has."""
        finite = {key: value if math.isfinite(value) else None for key, value in sorted(values.items())}
        _append(self._paths["metrics"], [{"time": time.time(), "step": step, "trainer_epoch": self._epoch, **finite}])

    def add_samples(self, step: int, samples: Iterable[BufferedSample]) -> None:
        """Add which versions made the tokens that train step `step` (from version step - 1 to step) consumed."""
        _append(
            self._paths["trajectories"],
            [
                {
                    "step": step,
                    "trainer_epoch": self._epoch,
                    "uid": sample.uid,
                    "order": sample.order,
                    "versions": [str(version) for version in sorted(sample.versions)],
                }
                for sample in samples
                if sample.versions
            ],
        )

    def seal(self) -> dict[str, int]:
        """Force both files to disk; the bytes that a commit covers, by `metrics` and `trajectories`."""
        return {name: _sync(path) for name, path in self._paths.items()}


def _append(path: Path, lines: list[dict[str, Any]]) -> None:
    if lines:
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


def _sync(path: Path) -> int:
    """Bytes of the file, which are on disk then; 0 if nothing was written yet."""
    try:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


def _cut(path: Path, size_bytes: int) -> None:
    present = path.stat().st_size if path.exists() else 0
    if present < size_bytes:
        logger.warning("%s has %d bytes, fewer than the %d that the commit covers", path, present, size_bytes)
    elif present > size_bytes:
        os.truncate(path, size_bytes)
