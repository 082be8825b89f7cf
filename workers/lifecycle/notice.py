"""SIGTERM in a step of a job: notice that the job is about to end, and no order to leave.

preemption --SIGTERM, GraceTime before the end--> all steps, and not the supervisor
    master --control/stop.json: checkpoint, then the next attempt--> supervisor, which asks SLURM why
    others: go on, as the last commit needs them
supervisor --SIGINT--> the worker leaves
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.mode import has_jobs

logger = logging.getLogger(__name__)


class Notice:
    """The handler of a signal that is told, and not obeyed."""

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self._tell = tell

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._tell()


def notice_of(mode: str, trial: TrialDirectory, kind: str, *, stop_grace_s: float) -> Notice | None:
    """What SIGTERM is to a worker; None where it is an order, because nobody but the supervisor sends it.

    Args:
        mode: of the trial.
        stop_grace_s: how long a last commit may take.
    """
    if not has_jobs(mode):
        return None
    tell = partial(request_last_commit, trial, stop_grace_s=stop_grace_s)
    return Notice(tell) if kind == "master_worker" else Notice()


def request_last_commit(trial: TrialDirectory, *, stop_grace_s: float) -> None:
    """Leaves a request to checkpoint and go on in the next attempt, unless somebody has asked for a stop already."""
    request = StopRequest(
        requested_at=time.time(),
        by="SLURM (SIGTERM to the steps)",
        now=False,
        grace_s=stop_grace_s,
        then="requeue",
        is_notice=True,
    )
    try:
        trial.write_stop_request(request, replace=False)
    except OSError as error:
        logger.warning("SLURM's notice of the job's end could not be passed on: %s", error)
