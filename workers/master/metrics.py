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

import msgspec

from corral.workers.master.sample_source import BufferedSample

logger = logging.getLogger(__name__)


class LineSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes of both files that a commit covers."""

    metrics: int
    trajectories: int


class StepLines:
    """Appends to the files of one trainer epoch; every method does file I/O."""

    def __init__(self, metrics_path: Path, trajectories_path: Path, *, epoch: int) -> None:
        self._metrics_path = metrics_path
        self._trajectories_path = trajectories_path
        self._epoch = epoch

    def cut_back(self, sizes: LineSizes) -> None:
        """Leave what the commit covers that this epoch continues; what was written after it was taken back."""
        _cut(self._metrics_path, sizes.metrics)
        _cut(self._trajectories_path, sizes.trajectories)

    def add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step; numbers that are not finite are written as null, which JSON has."""
        finite = {key: value if math.isfinite(value) else None for key, value in sorted(values.items())}
        _append(self._metrics_path, [{"time": time.time(), "step": step, "trainer_epoch": self._epoch, **finite}])

    def add_samples(self, step: int, samples: Iterable[BufferedSample]) -> None:
        """Add which versions made the tokens that train step `step` (from version step - 1 to step) consumed."""
        _append(
            self._trajectories_path,
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

    def seal(self) -> LineSizes:
        """Force both files to disk; what a commit covers."""
        return LineSizes(metrics=_sync(self._metrics_path), trajectories=_sync(self._trajectories_path))


def _append(path: Path, lines: list[dict[str, Any]]) -> None:
    if lines:
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


def _sync(path: Path) -> int:
    """Bytes of the file, which are on disk then; 0 if nothing was written yet."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _cut(path: Path, size_bytes: int) -> None:
    try:
        present = path.stat().st_size
    except FileNotFoundError:
        present = 0
    if present < size_bytes:
        logger.warning("%s has %d bytes, fewer than the %d that the commit covers", path, present, size_bytes)
    elif present > size_bytes:
        os.truncate(path, size_bytes)
