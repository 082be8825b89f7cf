"""What others write for a running attempt, looked at once a second, and at once when somebody has to know.

trial log, control/ --look, in the file thread--> Seen --take--> the supervisor's loop
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import Entry
from corral.launcher.files.file_thread import FileThread

logger = logging.getLogger(__name__)
T = TypeVar("T")

_INTERVAL_S = 1.0
_HURRY_S = 0.2  # while somebody waits for a look that the file system has refused


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
    is_superseded: bool = False
    """Whether a later attempt has begun."""


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
        self._looks: deque[tuple[int, Future[Seen]]] = deque()
        self._num_looks = 0
        self._last_whole = 0
        """Number of the last look that has read the trial log."""
        self._began_at = float("-inf")
        self._trouble = ""

    def ask(self, now: float) -> int:
        """Looks once more, from now on; returns the number of that look."""
        self._num_looks += 1
        self._began_at = now
        self._looks.append((self._num_looks, self._files.submit(self._look)))
        return self._num_looks

    def has_seen(self, number: int) -> bool:
        """Whether that look, or a later one, was taken, and has read the trial log."""
        return self._last_whole >= number

    def take(self, now: float, *, is_awaited: bool) -> list[Seen]:
        """What was found since the last call; looks again when it is time.

        Args:
            is_awaited: whether somebody cannot go on without a look.

        Raises:
            CorruptLogError: if the trial log is damaged.
        """
        found = []
        while self._looks and self._looks[0][1].done():
            number, future = self._looks.popleft()
            seen = future.result()
            found.append(seen)
            if seen.entries is not None:
                self._last_whole = number
        if not self._looks and now - self._began_at >= (_HURRY_S if is_awaited else _INTERVAL_S):
            self.ask(now)
        return found

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
        trouble = str(refused[0]) if refused else ""
        if trouble and trouble != self._trouble:
            logger.warning("the trial directory cannot be read now: %s", trouble)
        self._trouble = trouble
        return Seen(
            entries=None if entries is None else tuple(entries),
            stop_request=request,
            unreadable_stop_request=why_unreadable,
            groups_kept_down=kept_down,
            is_superseded=bool(is_superseded),
        )

    def _read_stop_request(self) -> tuple[StopRequest | None, str]:
        try:
            return self._directory.read_stop_request(), ""
        except ValueError as error:
            self._directory.clear_stop_request()
            return None, str(error)
