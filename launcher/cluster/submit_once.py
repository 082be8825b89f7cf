"""sbatch, once: a trial has one job, whatever happens between asking for it and hearing that it was taken.

sbatch --job id--> done
    +--no answer, an odd one--> squeue: a job with our comment is it; none, and the error stands
    +--Ctrl-C, SIGTERM--> squeue: what was taken is cancelled

All of this, the lock of a submission, and the supervisor's lock only spare a second job. Should there be one, each has
an attempt of its own, claimed by link(2) in control/, and the trial log lets only the master of one commit.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from corral.launcher.cluster.own_jobs import HEAD, OwnJobs
from corral.launcher.slurm.client import SlurmClient, SlurmError, SlurmUnreachableError, UncertainSubmissionError
from corral.launcher.slurm.parse import QueuedJob
from corral.launcher.slurm.words import is_active

_LOOK_PAUSE_S = 2.0


class SubmissionUnknownError(SlurmUnreachableError):
    """Nobody can say whether there is a job now."""


def submit_once(
    client: SlurmClient,
    options: Sequence[str],
    script: Path,
    *,
    is_it: Callable[[QueuedJob], bool],
    looks: int = 2,
) -> str:
    """Hands a batch script over; returns the job id, from squeue if sbatch did not say it.

    Args:
        client: the cluster.
        options: of sbatch.
        script: the batch script.
        is_it: tells the job, if it was taken, from all others of this user.
        looks: how often squeue is asked; a controller that is slow to answer may be slow to take the job, too.

    Raises:
        SlurmError: if there is no job.
        SubmissionUnknownError: if there may be one.
    """
    try:
        return client.submit(options, script)
    except UncertainSubmissionError as error:
        job_id = _look(client, is_it, error, looks)
        if not job_id:
            raise
        return job_id
    except BaseException as error:
        if not isinstance(error, Exception):  # not wanted any more: sbatch has got the same Ctrl-C, or was too fast
            _take_back(client, is_it)
        raise


def is_head_of(own: OwnJobs) -> Callable[[QueuedJob], bool]:
    """Tells a trial's own job that waits or runs from its components, from its extra jobs and from all others."""

    def is_it(job: QueuedJob) -> bool:
        # SLURM copies the comment of the first component to all of them.
        note = own.identify(job) if is_active(job.state) and not job.het_component else None
        return note is not None and note.allocation == HEAD

    return is_it


def _look(client: SlurmClient, is_it: Callable[[QueuedJob], bool], cause: SlurmError, looks: int) -> str:
    """The job that sbatch did not name, "" if there is none."""
    for number in range(looks):
        if number:
            time.sleep(_LOOK_PAUSE_S)
        try:
            found = [job for job in client.queue() if is_it(job)]
        except SlurmError as error:
            if number == looks - 1:
                raise SubmissionUnknownError(
                    f"nobody can say whether SLURM has taken the job: {cause}; then {error}"
                ) from error
            continue
        if found:
            return max(found, key=lambda job: int(job.job_id)).job_id
    return ""


def _take_back(client: SlurmClient, is_it: Callable[[QueuedJob], bool]) -> None:
    try:
        for job in client.queue():
            if is_it(job):
                client.cancel(job.job_id)
    except SlurmError:
        return  # without its trial directory the job ends as soon as it starts
