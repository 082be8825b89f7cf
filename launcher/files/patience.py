"""Files that have to be written: a file server that is away for minutes ends no trial.

work --momentary OSError--> pause, work again ... --done--> caller
                                              +--too long, or nobody wants it any more--> the error
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from corral.experiments.trial.log_state import UncertainAppendError
from corral.launcher.files.file_thread import is_momentary

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PATIENCE_S = 900.0  # a file server that moves to another machine takes minutes
_PAUSE_S = 1.0


class FilePatience:
    """Of those who can do nothing without the trial's files: what these refuse for a moment is tried again.

    Args:
        is_unwanted: whether nobody wants it done any more, so that the next error is the last.
    """

    def __init__(self, is_unwanted: Callable[[], bool] = lambda: False) -> None:
        self._is_unwanted = is_unwanted

    def insist(self, work: Callable[[], T], what: str) -> T:
        """What work returns.

        Args:
            work: reads or writes; it may be repeated from its beginning wherever it fails.
            what: it does, for people.

        Raises:
            OSError: if the files refused for long, or for good.
            UncertainAppendError: if an entry of the trial log stayed uncertain for long.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return work()
            except (OSError, UncertainAppendError) as error:
                is_for_good = isinstance(error, OSError) and not is_momentary(error)
                if is_for_good or self._is_unwanted() or time.monotonic() > deadline:
                    raise
                logger.warning("waiting for the files of the trial, to %s: %s", what, error)
            time.sleep(_PAUSE_S)
