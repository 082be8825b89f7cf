"""Prometheus: the newest numbers as one text file, for the textfile collector of node_exporter.

lines ──► newest value of each, sums of what counts ──flush──► corral-TRIAL_ID.prom, replaced as a whole
journal, NVML where there is one ──┘

In $CORRAL_TEXTFILE_DIR, where others may read it and from where it goes at the end of the trial; else in the folder.
Names and units are those of https://prometheus.io/docs/practices/naming/: what only grows ends in `_total`, and seconds
of a step are `corral_step_seconds`, by what it did. GPUs are those of the host that this runs on.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from corral.experiments.trial.journal import read_journal
from corral.launcher.tracking.tracker import TrackedTrial, emptied

_SECONDS = re.compile(r"time/(?P<part>.+)_s(?P<rest>/.+)?")
_TOTALS = re.compile("data/(samples_trained|samples_dropped|duplicates|dropped/.+)")
"""Numbers that only grow as they stand in a line."""
_SUMMED = ("train/tokens",)
"""Numbers of one step."""

Sample = tuple[str, tuple[tuple[str, str], ...], float]
"""A name, labels beside those of the trial, and a value."""


class PrometheusFile:
    """Begins anew with nothing."""

    def __init__(self, folder: Path, trial: TrackedTrial) -> None:
        shared = os.environ.get("CORRAL_TEXTFILE_DIR")
        self._path = Path(shared or emptied(folder)) / f"corral-{trial.uuid}.prom"
        self._is_shared = bool(shared)
        self._journal = trial.directory.journal_path
        self._journal_bytes = self._restarts = 0
        self._labels = (("experiment", trial.experiment), ("trial", trial.trial))
        self._values: dict[str, float] = {}
        self._written = ""

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        for name in _SUMMED:
            if name in values:
                values = {**values, name: self._values.get(name, 0.0) + values[name]}
        self._values |= values
        self._values["step"] = max(step, self._values.get("step", 0))
        self._values["last_line_timestamp_seconds"] = time_s

    def flush(self) -> None:
        self._count_restarts()
        by_name: dict[str, list[str]] = {}
        for name, labels, value in self._samples():
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in [*self._labels, *labels])
            by_name.setdefault(name, []).append(f"{name}{{{shown}}} {value!r}\n")
        text = "".join(
            f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n{''.join(lines)}"
            for name, lines in by_name.items()
        )
        if text != self._written:
            part = self._path.with_suffix(".part")
            part.write_text(text)
            if self._is_shared:
                part.chmod(0o644)
            part.rename(self._path)
            self._written = text

    def close(self) -> None:
        self.flush()
        if self._is_shared:
            self._path.unlink(missing_ok=True)

    def _count_restarts(self) -> None:
        size = self._journal.stat().st_size if self._journal.exists() else 0
        if size != self._journal_bytes:
            self._journal_bytes = size
            self._restarts = sum(event["event"] == "unit_restarting" for event in read_journal(self._journal))

    def _samples(self) -> Iterator[Sample]:
        for name, value in self._values.items():
            yield _sample(name, value)
        yield "corral_restarts_total", (), float(self._restarts)
        yield from _gpu_samples()


def _sample(name: str, value: float) -> Sample:
    """A number of metrics.jsonl, as the field would call it."""
    if match := _SECONDS.fullmatch(name):
        return "corral_step_seconds", (("part", match["part"] + (match["rest"] or "")),), value
    total = "_total" if name in _SUMMED or _TOTALS.fullmatch(name) else ""
    return "corral_" + re.sub(r"\W", "_", name) + total, (), value


def _gpu_samples() -> Iterator[Sample]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no package, no driver, no GPU: each has an error of its own
        return
    for index, handle in enumerate(handles):
        memory, labels = pynvml.nvmlDeviceGetMemoryInfo(handle), (("gpu", str(index)), ("node", os.uname().nodename))
        yield "corral_gpu_memory_used_bytes", labels, float(memory.used)
        yield "corral_gpu_memory_bytes", labels, float(memory.total)
        yield "corral_gpu_utilization_ratio", labels, pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
