"""Refusals: what a socket turned away, counted always and logged now and then.

Whoever holds a key, or only reaches a port, decides how much is turned away; a line for each would fill the disk.
"""

import logging
import time

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0


class Refusals:
    """Counts one kind of refusal."""

    def __init__(self, what: str) -> None:
        """what: such as "malformed messages to the control socket", for the log."""
        self._what = what
        self._next_line_at = float("-inf")
        self.count = 0

    def note(self, last: object) -> None:
        """One more; `last` says what it was."""
        self.count += 1
        if (now := time.monotonic()) >= self._next_line_at:
            self._next_line_at = now + _LOG_INTERVAL_S
            logger.warning("%d %s were refused so far, the last one: %s", self.count, self._what, last)
