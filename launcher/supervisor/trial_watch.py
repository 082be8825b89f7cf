"""What others write for a running attempt, looked at once a second, and at once when somebody has to know.

trial log, control/ --in the file thread--> Seen --look, which waits for it up to a deadline--> the supervisor's loop
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import Entry
from corral.launcher.files.file_thread import FILE_TIMEOUT_S, FileThread

logger = logging.getLogger(__name__)
T = TypeVar("T")

_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one look has found. What could not be read this time is as before."""

    entries: tuple[tuple[int, Entry], ...] | None = None
    """Of the trial log, with their slots, since the look before; None if it could not be read."""
    stop_request: StopRequest | None = None
    unreadable_stop_request: str = ""
    """Why control/stop.json is none."""
    groups_kept_down: frozenset[str] | None = None
    """Kinds of worker that rl-stop keeps down; None if that could not be read."""
    why_over: str = ""
    """Why this attempt is over: a later attempt has begun, or the folder was removed; "" if it is not."""


class TrialWatch:
    """Looks for one attempt.

    Args:
        files: the thread that looks.
        log: is read in that thread only.
    """

    def __init__(self, files: FileThread, directory: TrialDirectory, log: TrialLog, *, attempt: int) -> None:
        self._files = files
        self._directory = directory
        self._attempt = attempt
        self._log = log
        self._late: Future[Seen] | None = None
        """A look that the file system has not answered in time."""
        self._next_look = float("-inf")
        self._trouble = ""
        self._folder: int | None = None

    def look(self, now: float, *, is_awaited: bool) -> tuple[list[Seen], bool]:
        """What is found, if it is time to look, or somebody cannot go on without; and whether the trial log was read.

        Waits for the file system; while it hangs, not at all. What it says too late is found by a later look.

        Raises:
            CorruptLogError: if the trial log is damaged.
        """
        if now < self._next_look and not is_awaited:
            return [], False
        self._next_look = now + _INTERVAL_S
        found = []
        if self._late is not None:
            if not self._late.done():
                return [], False
            found.append(self._late.result())
        self._late = self._files.submit(self._look)
        if not self._files.wait_for(self._late, FILE_TIMEOUT_S):
            return found, False
        found.append(self._late.result())
        self._late = None
        return found, found[-1].entries is not None

    def _look(self) -> Seen:
        refused: list[OSError] = []

        def read(file: Callable[[], T]) -> T | None:
            try:
                return file()
            except OSError as error:
                refused.append(error)
                return None

        entries = read(self._log.poll)
        request, why_unreadable = read(self._read_stop_request) or (None, "")
        kept_down = read(self._directory.read_groups_kept_down)
        is_superseded = read((self._directory.control_path / f"claim-{self._attempt + 1}.json").exists)
        why_over = f"attempt {self._attempt + 1} has begun" if is_superseded else ""
        if read(self._is_removed):
            why_over = f"{self._directory.path} was removed"
        trouble = str(refused[0]) if refused else ""
        if trouble and trouble != self._trouble:
            logger.warning("the trial directory cannot be read now: %s", trouble)
        self._trouble = trouble
        return Seen(
            entries=None if entries is None else tuple(entries),
            stop_request=request,
            unreadable_stop_request=why_unreadable,
            groups_kept_down=kept_down,
            why_over=why_over,
        )

    def _is_removed(self) -> bool:
        """Whether the folder is gone for good; one that was moved still has a name."""
        if self._folder is None:
            self._folder = os.open(self._directory.path, os.O_RDONLY | os.O_DIRECTORY)
        # Some file systems report 0 names of every folder.
        return os.fstat(self._folder).st_nlink == 0 and not self._directory.path.exists()

    def _read_stop_request(self) -> tuple[StopRequest | None, str]:
        try:
            return self._directory.read_stop_request(), ""
        except ValueError as error:
            self._directory.clear_stop_request()
            return None, str(error)
