"""Watches: a callback once all of some names are gone.

    survey (names present, which store) --> GoneVerdict (pure) --> on_all_gone(), once

    TRUSTED -----------all absent------------> fired
       |  ^
       |  `---- grace_s after the store is back ----.
       `-- unreachable, or its contents were lost --> IN GRACE    absence proves nothing: owners register again

A Redis that was restarted has lost every name while all owners live. So after an outage, and after the store lost its
contents, no verdict is given for a grace period, which is longer than the keepalive needs to register again.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from corral.name_resolve.errors import NameServiceError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0  # a survey in progress ends with the socket timeout, well before


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one look at the store showed.

    Example:
        Survey(num_present=0, incarnation="9c1f")  # all gone, or (if "9c1f" is new) the store was emptied
    """

    num_present: int
    incarnation: str  # changes when the store loses its contents


class GoneVerdict:
    """Decides from a series of surveys when all names are gone."""

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._incarnation: str | None = None
        self._trusted_from_s = float("-inf")
        self._was_unreachable = False

    def observe(self, survey: Survey | None, *, now_s: float) -> bool:
        """Take in a survey (None: the store could not be reached); True means that the names are gone."""
        if survey is None:
            self._was_unreachable = True
            return False
        is_new_store = self._incarnation is not None and survey.incarnation != self._incarnation
        if self._was_unreachable or is_new_store:
            self._trusted_from_s = now_s + self._grace_s
        self._was_unreachable = False
        self._incarnation = survey.incarnation
        return survey.num_present == 0 and now_s >= self._trusted_from_s


class Watch:
    """A thread that surveys until the names are gone or `close()` is called."""

    def __init__(
        self,
        survey: Callable[[], Survey],
        on_all_gone: Callable[[], None],
        *,
        poll_interval_s: float,
        grace_s: float,
        description: str,
    ) -> None:
        self._survey = survey
        self._on_all_gone = on_all_gone
        self._poll_interval_s = poll_interval_s
        self._verdict = GoneVerdict(grace_s=grace_s)
        self._description = description
        self._closed = threading.Event()
        self.fired = False
        """Whether the callback was called."""
        self.num_surveys = 0
        """How often the store was asked and its answer judged."""
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name=f"watch {description}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; after this returns the callback is not called any more. May be called from the callback."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning(
                    "watch of %s still runs its callback %s s after close", self._description, _CLOSE_TIMEOUT_S
                )

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            are_gone = self._verdict.observe(self._look(), now_s=time.monotonic())
            self.num_surveys += 1
            if are_gone and not self._closed.is_set():
                self.fired = True
                self._on_all_gone()
                return
            self._closed.wait(self._poll_interval_s)

    def _look(self) -> Survey | None:
        try:
            survey = self._survey()
        except NameServiceError as error:
            if not self._is_failing:
                logger.warning("watch of %s sees nothing, looking on: %s", self._description, error)
            self._is_failing = True
            return None
        self._is_failing = False
        return survey
