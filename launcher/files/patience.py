"""What a trial cannot do without: a file server or a controller that is away for minutes ends no trial.

work --momentary error--> pause, work again ... --done--> caller
                                            +--too long, or nobody wants it any more--> the error
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from corral.experiments.trial.log_state import UncertainAppendError
from corral.launcher.files.file_thread import is_momentary

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 900.0  # a server that moves to another machine takes minutes
_PAUSE_S = 1.0


def wait_until(is_so: Callable[[], bool], *, timeout_s: float, pause_s: float = 0.02) -> bool:
    """Whether it became so in time; looked at once in any case."""
    deadline = time.monotonic() + timeout_s
    while not (answer := is_so()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    return answer


@dataclass(frozen=True, slots=True)
class FilePatience:
    """Of those who can do nothing without the trial's files: what these refuse for a moment is tried again."""

    is_unwanted: Callable[[], bool] = lambda: False
    """Whether nobody wants it done any more, so that the next error is the last."""

    def insist(self, what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work with these arguments, and return its result.

        Args:
            what: it does, for people.
            work: reads or writes; it may be repeated from its beginning wherever it fails.

        Raises:
            OSError: if the files refused for long, or for good.
            UncertainAppendError: if an entry of the trial log stayed uncertain for long.
        """

        def may_pass(error: Exception) -> bool:
            is_for_good = isinstance(error, OSError) and not is_momentary(error)
            return isinstance(error, OSError | UncertainAppendError) and not is_for_good and not self.is_unwanted()

        return insist(partial(work, *args, **kwargs), may_pass, waiting_for=f"the files of the trial, to {what}")


def insist(
    work: Callable[[], T], may_pass: Callable[[Exception], bool], *, waiting_for: str, patience_s: float = PATIENCE_S
) -> T:
    """The result of work; an error that may pass is raised only after a long time, any other at once."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return work()
        except Exception as error:
            if not may_pass(error) or time.monotonic() > deadline:
                raise
            logger.warning("waiting for %s: %s", waiting_for, str(error).partition("\n")[0])
        time.sleep(_PAUSE_S)
