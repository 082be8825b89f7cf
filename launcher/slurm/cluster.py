"""SLURM as corral's cluster: each question becomes calls of `client`, each answer words of our own.

RunPlan, Layout --sbatch--> options, scripts            environment of the batch step --step--> OwnJob
squeue, scontrol, sacct --job_queue--> Job              scontrol, slurmd's line in the log --job_end--> JobEnd
"""

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence

from corral.experiments.trial.attempts import EndState
from corral.experiments.trial.directory import TrialDirectory, atomic_write, read_tail
from corral.launcher.cluster.errors import answer_or
from corral.launcher.cluster.jobs import JobPhase
from corral.launcher.cluster.own_job import JobEnd, JobProspect, OwnJob
from corral.launcher.layout.layout import PlacedTrial, RunningAllocations
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.slurm.sbatch import (
    extra_job_options,
    extra_job_path,
    render_extra_job,
    render_script,
    successor_options,
)
from corral.launcher.slurm.srun import SrunRunner
from corral.launcher.slurm.verdict import meaning_of, phase_of, state_word

_OUTPUT_TAIL_BYTES = 65536


# Why SLURM ends a job, and whether it will start it again. Pure; the words were observed on a real cluster.
#
# While the batch script is being ended its job is COMPLETING whatever the cause, so the state alone tells nothing:
#
#                              Restarts    Reason       PreemptTime    slurmstepd: JOB n CANCELLED AT ... DUE TO
#     scancel                  as before   None                        (nothing)
#     time limit               as before   TimeLimit                   TIME LIMIT
#     preempted                + 1         None         set, then gone PREEMPTION
#     preempted, no requeue    as before   None         set            (nothing)
#     node failure             + 1         None                        NODE FAILURE
#     node failure, no requeue as before   NodeDown                    NODE FAILURE
#     scontrol requeue         + 1         None                        JOB REQUEUE
#
# In the grace period of a preemption the job is RUNNING with a PreemptTime: its steps got SIGTERM, its script did not.

_DAEMON_LINE = re.compile(r"\*\*\* JOB (\d+) ON \S+ CANCELLED AT \S+ *(?:DUE TO ([A-Z ]+?))?(?:,[^*]*)? *\*\*\*")
_STATE_BY_DAEMON_WORD = {
    "TIME LIMIT": EndState.TIMED_OUT,
    "PREEMPTION": EndState.PREEMPTED,
    "NODE FAILURE": EndState.NODE_FAILED,
    "JOB REQUEUE": EndState.REQUEUED,
}
_STATE_BY_REASON = {"TimeLimit": EndState.TIMED_OUT, "NodeDown": EndState.NODE_FAILED}
_STATES = (EndState.TIMED_OUT, EndState.PREEMPTED, EndState.NODE_FAILED, EndState.REQUEUED)
"""Ends that SLURM's word for a job tells by itself; any other is somebody's scancel."""
_NEVER = ("None", "N/A", "Unknown", "")


def look_ahead(job: Mapping[str, str] | None, *, restart_count: int) -> JobProspect:
    """What becomes of a job, by `scontrol show job`; None, if SLURM could not be asked, says nothing.

    Args:
        restart_count: how often it had been requeued when it started.
    """
    fields = job or {}
    restarts = fields.get("Restarts", "")
    return JobProspect(
        is_preempted=fields.get("PreemptTime", "") not in _NEVER,
        is_requeued=restarts.isdecimal() and int(restarts) > restart_count,
        is_ending=phase_of(fields.get("JobState", "")) in (JobPhase.LEAVING, JobPhase.ENDED),
    )


def explain_end(job: Mapping[str, str] | None, job_output: str, *, job_id: str, restart_count: int) -> JobEnd:
    """Why this job is being ended.

    Args:
        job: fields of `scontrol show job`, or None if SLURM could not be asked.
        job_output: what the batch script's output file holds; slurmstepd writes its line there before it signals.
        restart_count: how often it had been requeued when it started.
    """
    said = [match[2] for match in _DAEMON_LINE.finditer(job_output) if match[1] == job_id]
    # A line that an earlier start of this job got stays in the file: one for each requeue.
    own_words = said[restart_count:]
    by_daemon = _STATE_BY_DAEMON_WORD.get(own_words[-1] or "", EndState.CANCELLED) if own_words else None
    if job is None:
        # Our jobs ask to be requeued, so where nothing else is known they are.
        is_requeued = by_daemon in (EndState.REQUEUED, EndState.NODE_FAILED, EndState.PREEMPTED)
        return JobEnd(state=by_daemon or EndState.UNKNOWN, is_requeued=is_requeued)
    prospect = look_ahead(job, restart_count=restart_count)
    if by_daemon not in (None, EndState.CANCELLED):
        return JobEnd(state=by_daemon, is_requeued=prospect.is_requeued)
    if prospect.is_requeued:
        return JobEnd(state=EndState.REQUEUED, is_requeued=True)
    word = state_word(job.get("JobState", ""))
    if prospect.is_preempted:
        state = EndState.PREEMPTED
    elif word == "RUNNING":
        state = EndState.STOPPED  # also with a line of slurmstepd, which `scancel --batch --signal=TERM` leaves
    else:
        told = meaning_of(word)[0]
        by_word = EndState(told) if told in _STATES else EndState.CANCELLED
        state = _STATE_BY_REASON.get(job.get("Reason", ""), by_word)
    return JobEnd(state=state, is_requeued=False)


def why_leaving(job: Mapping[str, str] | None) -> str:
    """Why a job that runs, or ran, will not be there much longer; "" if it stays."""
    if job is None:
        return "SLURM does not know its job any more"
    word = state_word(job.get("JobState", ""))
    if word == "RUNNING" and look_ahead(job, restart_count=0).is_preempted:
        return "its job is being preempted"
    return "" if word in ("RUNNING", "SUSPENDED") else f"its job is {word}"


class SlurmCluster(SlurmQueue):
    """A cluster as submissions and supervisors need it.

    Raises:
        UncertainSubmissionError: each method that submits, if SLURM may have taken the job without saying so.
    """

    def script(self, trial: PlacedTrial) -> bytes:
        """What SLURM runs on the head's first node: it becomes the supervisor. ConfigError if it cannot be a script."""
        return os.fsencode(render_script(trial))

    def write_scripts(self, trial: PlacedTrial) -> None:
        """Puts the scripts of the trial's jobs into its folder."""
        atomic_write(trial.directory.sbatch_path, self.script(trial), mode=0o700)
        _write_extra_job(trial.directory)

    def submit_trial(self, directory: TrialDirectory) -> str:
        """Hands the trial's job over; returns its id."""
        return self._client.submit([], directory.sbatch_path)

    def submit_successor(self, trial: PlacedTrial, *, after: str, exclude_nodes: Sequence[str]) -> str:
        """The same job again, which waits for the end of job `after`."""
        options = successor_options(trial.layout, after=after, exclude_nodes=exclude_nodes)
        return self._client.submit(options, trial.directory.sbatch_path)

    def submit_extra_job(
        self, trial: PlacedTrial, allocation: int, *, attempt: int, exclude_nodes: Sequence[str]
    ) -> str:
        """A job that only keeps the nodes of one allocation. OSError if its script cannot be written."""
        options = extra_job_options(trial, allocation, attempt=attempt, exclude_nodes=exclude_nodes)
        script = extra_job_path(trial.directory)
        if not script.exists():
            _write_extra_job(trial.directory)
        return self._client.submit(options, script)

    def why_leaving(self, job_id: str) -> str:
        """Why a job that runs, or ran, will not be there much longer; "" if it stays."""
        return why_leaving(self._client.job(job_id))

    def end_steps(self, job_id: str, *, timeout_s: float) -> None:
        """Ends what runs in a job, and not the job."""
        self._client.end_steps(job_id, timeout_s=timeout_s)

    def prospect(self, own: OwnJob) -> JobProspect:
        """What SLURM has decided about our job; nothing, if it does not say."""
        return look_ahead(answer_or(None, self._client.job, own.job_id), restart_count=own.restart_count)

    def why_ending(self, own: OwnJob, directory: TrialDirectory) -> JobEnd:
        """Why our job is being ended, as far as SLURM and the log of its script say."""
        said = ""
        with contextlib.suppress(OSError):  # the user's own template may write elsewhere; then scontrol has to tell
            log = read_tail(directory.logs_path / f"slurm-{own.job_id}.log", _OUTPUT_TAIL_BYTES)
            said = log.decode(errors="replace")
        job = answer_or(None, self._client.job, own.job_id)
        return explain_end(job, said, job_id=own.job_id, restart_count=own.restart_count)

    def requeue(self, job_id: str) -> None:
        """Puts a job that runs back into the queue, which ends it now."""
        self._client.requeue(job_id)

    def make_runner(
        self, trial: PlacedTrial, *, allocations: Callable[[], RunningAllocations], why_away: Callable[[int], str]
    ) -> SrunRunner:
        """Starts workers in allocations, see `SrunRunner`."""
        return SrunRunner(client=self._client, trial=trial, allocations=allocations, why_away=why_away)


def _write_extra_job(directory: TrialDirectory) -> None:
    atomic_write(extra_job_path(directory), os.fsencode(render_extra_job(directory)), mode=0o700)
