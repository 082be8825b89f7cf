"""What can go wrong between corral and a cluster.

ClusterError
    ClusterUnreachableError           nothing is known about any job
        UncertainSubmissionError      the cluster may have taken the job
        SubmissionUnknownError        nobody can say whether it has
"""


class ClusterError(RuntimeError):
    """The cluster was asked, and refused; the text is what it said."""


class ClusterUnreachableError(ClusterError):
    """Its commands are missing, time out, or find no controller: nothing is known about any job."""


class UncertainSubmissionError(ClusterUnreachableError):
    """It was asked to take a job and did not answer as it should: it may have taken it all the same."""


class SubmissionUnknownError(ClusterUnreachableError):
    """Nobody can say whether there is a job now."""
