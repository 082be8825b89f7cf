"""The records of an attempt: journal lines and small files, written in the file thread, later if they cannot be now.

    event      --a line--> lines --+--in order--> events.jsonl
    keep, end  --a file--> files --+            > control/
                                   |
                 refused: kept, and tried again each second; the log says how many came late

A full disk, or a file server that forgets its clients, ends nothing; if it stays so to the end, it costs these words.
"""

import logging
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial

from corral.experiments.own_python import own_python
from corral.experiments.trial.attempts import AttemptEnd, write_end
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import Journal, Refusable, event_line
from corral.experiments.trial.tether import die_with_parent
from corral.launcher.files.file_thread import FileThread, is_momentary
from corral.launcher.trial.lock import PAGE_TIMEOUT_S

logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0  # a reader after a write finds it, unless the file system hangs
_PAUSE_S = 1.0


class Recorder:
    """Writes the journal of one attempt, and other files that explain."""

    def __init__(self, files: FileThread, journal: Journal, *, attempt: int) -> None:
        self._files = files
        self.attempt = attempt
        self._lines = journal.lines
        self._writes = Refusable[Callable[[], None]](lambda write: write())
        self._trouble = ""
        """Why a record could not be written when it came; "" if all is well."""
        self._is_for_good = False
        """Whether it never can be, as in a folder that was removed."""
        self._num_late = 0
        self._next_try = 0.0

    def event(self, name: str, **fields: object) -> None:
        """Adds a line to the journal, with the present time whenever it comes to be written."""
        is_kept = self._lines.add(event_line(name, attempt=self.attempt, **fields))
        if is_kept and not self._trouble and not self._files.wait_for(self._files.submit(self._write), _PATIENCE_S):
            self._trouble = "the file system hangs"

    def keep(self, write: Callable[[], None]) -> None:
        """Has a file written that explains, without waiting for it."""
        if self._writes.add(write) and not self._trouble:
            self._files.submit(self._write)

    def end(self, directory: TrialDirectory, end: AttemptEnd) -> None:
        """Records how the attempt ended, and tells the journal. What the files refuse is tried again until `close`."""
        self._writes.waiting.append(partial(write_end, directory, end))  # however much waits: others decide on it
        self._files.wait_for(self._files.submit(self._write), _PATIENCE_S)
        self.event("attempt_ended", state=end.state, cause=end.cause, then=end.then, caused_by=end.caused_by)

    def try_again(self, now: float) -> None:
        """Called once in a while: what was refused is tried again."""
        if self._trouble and now >= self._next_try and not self._files.hangs:
            self._next_try = now + _PAUSE_S
            self._files.submit(self._write)

    def close(self, *, timeout_s: float) -> None:
        """Waits until all is written; lines that are not in time go to this process's own log."""
        deadline = time.monotonic() + timeout_s
        while wait([self._files.submit(self._write)], max(0.0, deadline - time.monotonic())).done:
            if not self._trouble or self._is_for_good or time.monotonic() + _PAUSE_S > deadline:
                break
            time.sleep(_PAUSE_S)
        for line in tuple(self._lines.waiting):
            logger.warning("not in the journal: %s", line.decode())

    def _write(self) -> None:
        """In the file thread. Lines and files do without each other: a quota may refuse new files only."""
        before = self._num_written
        lines_refused, files_refused = self._lines.flush(), self._writes.flush()
        refused = lines_refused or files_refused
        self._is_for_good = refused is not None and not is_momentary(refused)
        self._num_late += (self._num_written - before) * bool(self._trouble)
        if not refused and self._trouble:
            numbers = {"late": self._num_late, "dropped": self._lines.num_dropped + self._writes.num_dropped}
            self._num_late = self._lines.num_dropped = self._writes.num_dropped = 0
            self._lines.add(event_line("records_late", attempt=self.attempt, **numbers, cause=self._trouble))
            refused = self._lines.flush()
        elif refused and not self._trouble:
            logger.warning("journal or files of control/ cannot be written now: %s", refused)
        self._trouble = str(refused or "")

    @property
    def _num_written(self) -> int:
        return self._lines.num_written + self._writes.num_written


def write_page(directory: TrialDirectory, state: str, record: Callable[..., None]) -> None:
    """Draws the page of a trial that has ended, in a process of its own."""
    if not directory.metrics_path.exists():
        return
    command = own_python("-m", "corral.launcher.page", str(directory.path), state)
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=PAGE_TIMEOUT_S, preexec_fn=die_with_parent())
    except (OSError, subprocess.SubprocessError) as error:
        output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error).encode()
        record("page_failed", cause=output.decode(errors="replace")[-2000:])


def note_failed_node(directory: TrialDirectory, node: str, record: Callable[..., None]) -> None:
    """Later attempts avoid the node; where that cannot be written, they may get it again, and fail again."""
    try:
        directory.note_failed_node(node)
    except OSError as error:
        record("failed_node_not_noted", node=node, cause=str(error))
    record("node_failed", node=node)
