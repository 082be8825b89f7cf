"""News: a program of the user's own, whenever a rule of the watchers begins to speak of the last train steps.

lines ──last ones──► rules ──one that did not speak before──► program ◄── {"trial", "step", "text", "remedy"}

What follows, an e-mail or a message to a room, is the program's. It is started once for each beginning, and once more
for what is still so when the tracker is started again. One that fails or takes too long is told in the log, no more.
"""

import json
import subprocess
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.launcher.tracking.tracker import TrackedTrial
from corral.launcher.trial.watchers import findings_of

_NUM_LINES = 100  # more than any rule looks at
_TIMEOUT_S = 60.0


class NewsCommand:
    """Needs no folder."""

    def __init__(self, folder: Path, trial: TrackedTrial) -> None:
        self._command = tuple(trial.config["tracking"]["command"])
        self._name = f"{trial.experiment}/{trial.trial}"
        self._lines = deque[dict[str, Any]](maxlen=_NUM_LINES)
        self._speaking: set[str] = set()

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._lines.append({"step": step, "time": time_s, **values})

    def flush(self) -> None:
        findings = {finding.topic: finding for finding in findings_of(self._lines, trial=self._name)}
        for topic in findings.keys() - self._speaking:
            found = findings[topic]
            told = {"trial": self._name, "step": found.step, "text": found.text, "remedy": found.details}
            self._run(json.dumps(told) + "\n")
        self._speaking = set(findings)

    def close(self) -> None:
        self.flush()

    def _run(self, line: str) -> None:
        print(f"{self._command[0]}: {line}", end="", flush=True)
        try:
            subprocess.run(self._command, input=line, text=True, timeout=_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            print(error, flush=True)
