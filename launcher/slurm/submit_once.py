"""A submission, once: a trial has one job, whatever happens between asking for it and hearing that it was taken.

submit --job id--> done
    +--no answer, an odd one--> the queue: a job with our comment is it; none, and the error stands
    +--Ctrl-C, SIGTERM--> the queue: what was taken is cancelled

All of this, the lock of a submission, and the supervisor's lock only spare a second job. Should there be one, each has
an attempt of its own, claimed by link(2) in control/, and the trial log lets only the master of one commit.
"""

import time
from collections.abc import Callable

from corral.launcher.cluster.errors import ClusterError, SubmissionUnknownError, UncertainSubmissionError
from corral.launcher.cluster.jobs import Job
from corral.launcher.cluster.own_jobs import HEAD, OwnJobs
from corral.launcher.slurm.job_queue import SlurmQueue

_LOOK_PAUSE_S = 2.0


def submit_once(queue: SlurmQueue, submit: Callable[[], str], *, is_it: Callable[[Job], bool], looks: int = 2) -> str:
    """Hands a job over; returns its id, from the queue if the submission did not say it.

    Args:
        is_it: tells the job, if it was taken, from all others of this user.
        looks: how often the queue is asked; a cluster that is slow to answer may be slow to take the job, too.

    Raises:
        ClusterError: if there is no job.
        SubmissionUnknownError: if there may be one.
    """
    try:
        return submit()
    except UncertainSubmissionError as error:
        if job_id := _look(queue, is_it, error, looks):
            return job_id
        raise
    except Exception:
        raise
    except BaseException:  # not wanted any more: the command has got the same Ctrl-C, or was too fast
        _take_back(queue, is_it)
        raise


def is_head_of(own: OwnJobs) -> Callable[[Job], bool]:
    """Tells a trial's own job that waits or runs from its components, from its extra jobs and from all others."""

    def is_it(job: Job) -> bool:
        # A cluster may copy the comment of the first component to all of them.
        note = own.identify(job) if job.is_active and not job.part_of else None
        return note is not None and note.allocation == HEAD

    return is_it


def _look(queue: SlurmQueue, is_it: Callable[[Job], bool], cause: ClusterError, looks: int) -> str:
    """The job that the submission did not name, "" if there is none."""
    for number in range(looks):
        if number:
            time.sleep(_LOOK_PAUSE_S)
        try:
            found = [job for job in queue.jobs() if is_it(job)]
        except ClusterError as error:
            if number == looks - 1:
                raise SubmissionUnknownError(
                    f"nobody can say whether the cluster has taken the job: {cause}; then {error}"
                ) from error
            continue
        if found:
            return max(found, key=lambda job: job.number).job_id
    return ""


def _take_back(queue: SlurmQueue, is_it: Callable[[Job], bool]) -> None:
    try:
        for job in queue.jobs():
            if is_it(job):
                queue.cancel(job.job_id)
    except ClusterError:
        return  # without its trial directory the job ends as soon as it starts
