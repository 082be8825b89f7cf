"""What SLURM's commands say when they refuse, as values: its sentences are compared here and nowhere else.

stderr of sbatch, scontrol, scancel, ... --complaint_of--> Complaint
"""

import re
from enum import StrEnum


class Complaint(StrEnum):
    """Why a command failed."""

    NO_ANSWER = "the controller did not answer in time"
    """It may have done what it was asked for."""
    UNREACHABLE = "no controller"
    NO_SUCH_JOB = "no such job"
    HAS_ENDED = "the job or step has ended already"
    LIMIT = "a limit of the QOS or the account"
    TIME = "the moment of the start"
    TIME_LIMIT = "the time limit"
    NODES = "no nodes at present that could run it"
    """Too few, too small, down, drained: SLURM has one sentence for all of them."""
    NODE_NAMES = "a node that there is not"
    PARTITION = "the partition"
    RESERVATION = "the reservation"
    ACCOUNT = "the account"
    QOS = "the QOS"
    FEATURE = "a feature"
    LICENSE = "a license"
    OTHER = "something else"


# The first that matches counts. Most are slurm_strerror's sentences, which have been the same since version 20.
_TABLE: tuple[tuple[str, Complaint], ...] = (
    (r"socket timed out|did not answer within", Complaint.NO_ANSWER),
    (r"unable to contact|connection refused|configuration source", Complaint.UNREACHABLE),
    (r"invalid job id|not found", Complaint.NO_SUCH_JOB),
    (r"already", Complaint.HAS_ENDED),
    (r"accounting/qos policy|usage threshold|submit limit", Complaint.LIMIT),
    (r"requested time limit|--time(-min)?\b|time-min", Complaint.TIME_LIMIT),
    (r"invalid time specified|--begin|--deadline|deadline time", Complaint.TIME),
    (r"invalid node name|--nodelist|number of nodes|node count", Complaint.NODE_NAMES),
    (r"reservation", Complaint.RESERVATION),
    (r"node configuration is not available|nodes are busy|node not available", Complaint.NODES),
    (r"partition name|partition not available|not in this partition", Complaint.PARTITION),
    (r"invalid account", Complaint.ACCOUNT),
    (r"\bqos\b", Complaint.QOS),
    (r"feature|constraint", Complaint.FEATURE),
    (r"license", Complaint.LICENSE),
)


def complaint_of(said: str) -> Complaint:
    """The value of what a command printed on stderr; OTHER for what is in no table."""
    return next((complaint for text, complaint in _TABLE if re.search(text, said, re.IGNORECASE)), Complaint.OTHER)
