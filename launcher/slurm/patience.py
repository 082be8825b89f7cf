"""Questions that have to be answered: a controller that is away for minutes ends no trial.

ask --SlurmUnreachableError--> pause, ask again ... --answer--> caller
                                                +--too long--> the error
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from corral.launcher.slurm.client import SlurmUnreachableError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PATIENCE_S = 900.0  # a controller that moves to another machine takes minutes
_PAUSE_S = 1.0


def patiently(ask: Callable[[], T], what: str, *, patience_s: float = _PATIENCE_S, pause_s: float = _PAUSE_S) -> T:
    """What SLURM answers; one that does not answer at the moment is asked again for a long time.

    Args:
        ask: the question.
        what: is asked for, for people.
        patience_s: how long SLURM may be away.
        pause_s: between two questions.

    Raises:
        SlurmUnreachableError: if it was away for longer.
        SlurmError: whatever else SLURM says.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except SlurmUnreachableError as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("waiting for %s: %s", what, str(error).partition("\n")[0])
            time.sleep(pause_s)
