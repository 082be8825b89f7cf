"""Why SLURM ends a job, and whether it will start it again. Pure; the words were observed on a real cluster.

While the batch script is being ended its job is COMPLETING whatever the cause, so the state alone tells nothing:

                             Restarts    Reason       PreemptTime    slurmstepd: JOB n CANCELLED AT ... DUE TO
    scancel                  as before   None                        (nothing)
    time limit               as before   TimeLimit                   TIME LIMIT
    preempted                + 1         None         set, then gone PREEMPTION
    preempted, no requeue    as before   None         set            (nothing)
    node failure             + 1         None                        NODE FAILURE
    node failure, no requeue as before   NodeDown                    NODE FAILURE
    scontrol requeue         + 1         None                        JOB REQUEUE

In the grace period of a preemption the job is RUNNING with a PreemptTime: its steps got SIGTERM, its script did not.
"""

import re
from collections.abc import Mapping

from corral.experiments.trial.attempt_end_record import EndState
from corral.launcher.cluster.jobs import JobPhase
from corral.launcher.cluster.own_job import JobEnd, JobProspect
from corral.launcher.slurm.verdict import meaning_of, phase_of, state_word

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
