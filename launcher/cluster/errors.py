"""What can go wrong between corral and a cluster.

ClusterError
    ClusterUnreachableError           nothing is known about any job
        UncertainSubmissionError      the cluster may have taken the job
        SubmissionUnknownError        nobody can say whether it has
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from corral.experiments.exit_codes import CommandExit, UserError

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")


class ClusterError(UserError):
    """The cluster was asked, and refused; the text is what it said."""

    exit_code = CommandExit.REFUSED


class ClusterUnreachableError(ClusterError):
    """Its commands are missing, time out, or find no controller: nothing is known about any job."""

    exit_code = CommandExit.UNREACHABLE


class UncertainSubmissionError(ClusterUnreachableError):
    """It was asked to take a job and did not answer as it should: it may have taken it all the same."""


class SubmissionUnknownError(ClusterUnreachableError):
    """Nobody can say whether there is a job now."""


def answer_or(otherwise: D, ask: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | D:
    """What the cluster answers, where an answer is not needed; `otherwise` if it gives none."""
    try:
        return ask(*args, **kwargs)
    except ClusterError:
        return otherwise
