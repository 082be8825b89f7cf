"""How trials stand: facts from the trial directory, Redis and the queue go in, a word and a row per worker come out.

    journal, trial log, stop request --+
    lock of the supervisor (local) ----+--> Evidence --judge (pure)--> TrialStatus
    jobs, one look for all (cluster) --+
    leases in Redis -------------------+

Redis and the cluster may know nothing, now or any more: what they cannot say is left out, never an error. The states:

    QUEUED BLOCKED HELD REQUEUED   not started by the cluster, or put back by it
    STARTING RUNNING DEGRADED UNRESPONSIVE STOPPING SUSPENDED
    COMPLETE STOPPED FAILED        the trial's own record of its end
    CANCELLED TIMED_OUT NODE_FAILED PREEMPTED OOM     the cluster's word, where the trial could not leave one
    LOST                           it ended without a word    UNKNOWN   nobody can say
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.mode import has_jobs
from corral.experiments.trial.worker_record import MASTER
from corral.launcher.slurm.verdict import JobPhase
from corral.launcher.status.evidence import (
    Evidence,
    GroupRow,
    WorkerRow,
    describe_extra_job,
    group_rows,
    trouble,
    worker_rows,
)
from corral.launcher.status.waits import WaitChain, find_waits
from corral.launcher.terminal import format_duration, format_moment
from corral.launcher.trial.metrics import Pace, headline, last_lines, newest_of, pace_of
from corral.launcher.trial.view import Finding, PastAttempt, WorkerLife
from corral.launcher.trial.watchers import findings_of
from corral.launcher.trial.words import ABSENT, FINAL_STATES, NOT_STARTED, TROUBLED, TrialState, WorkerState

_FIRST_START_S = 15.0  # between rl-submit's record and the supervisor's lock
_FRESH_BEAT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStatus:
    """One trial, as rl-status shows it."""

    experiment: str
    trial: str
    directory: str
    mode: str
    state: TrialState
    step: int | None = None
    total_steps: int | None = None
    age_s: float | None = None
    nodes: int | None = None
    job_id: str = ""
    attempt: int | None = None
    note: str = ""
    """The cause of the state, other troubles, and alarms."""
    cause: str = ""
    """The cause of the state."""
    troubles: Sequence[str] = ()
    """Other troubles, with remedies."""
    numbers: str = ""
    """The few that say how training goes."""
    pace: Pace | None = None
    """Of its last train steps."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    workers: Sequence[WorkerRow] = ()
    groups: Sequence[GroupRow] = ()
    waits: Sequence[WaitChain] = ()
    history: Sequence[PastAttempt] = ()
    findings: Sequence[Finding] = ()
    """What train steps have found out."""
    watch: Sequence[Finding] = ()
    """What its last numbers usually precede."""
    node_list: str = ""
    """The head's nodes, as the cluster writes them."""
    time_left: str = ""
    ended_at: float | None = None

    @property
    def speed(self) -> str:
        """`1.3 s/step  2,300 tokens/s  about 1m02s to go`, while it trains."""
        if self.pace is None or self.state is not TrialState.RUNNING:
            return ""
        parts = [f"{self.pace.step_s:.3g} s/step"]
        if self.pace.tokens_per_s:
            parts.append(f"{self.pace.tokens_per_s:,.0f} tokens/s")
        if self.total_steps and self.step is not None and self.step < self.total_steps:
            parts.append(f"about {format_duration((self.total_steps - self.step) * self.pace.step_s)} to go")
        return "  ".join(parts)

    @property
    def is_final(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.state in FINAL_STATES


def unreadable(directory: Path, note: str) -> TrialStatus:
    """The status of a trial of which only the place is known."""
    return TrialStatus(
        experiment=directory.parent.name,
        trial=directory.name,
        directory=str(directory),
        mode="",
        state=TrialState.UNKNOWN,
        note=note,
        cause=note,
    )


def describe(evidence: Evidence) -> TrialStatus:
    """The status that the evidence supports. Reads no more than the end of the metrics."""
    facts = evidence.facts
    rows = worker_rows(evidence)
    state, why = judge(evidence, rows)
    cause, troubles = (
        _join(why, *evidence.zombies),
        [*filter(None, evidence.damage), *_reported_troubles(evidence), *_failing_trackers(evidence)],
    )
    lines = last_lines(facts.directory.metrics_path)
    metrics = newest_of(lines)
    submitted_at = evidence.attempt.submitted_at if evidence.attempt else None
    ended_at = evidence.ended.ended_at if evidence.ended else None
    nodes = {life.node for worker in facts.workers if (life := evidence.lives[worker]).node}
    job = evidence.job
    return TrialStatus(
        experiment=facts.experiment,
        trial=facts.trial,
        directory=str(facts.directory.path),
        mode=facts.mode,
        state=state,
        step=metrics.get("step"),
        total_steps=facts.total_steps,
        age_s=max(0.0, (ended_at or evidence.now) - submitted_at) if submitted_at is not None else None,
        nodes=len(nodes) or (job.num_nodes if job else None),
        job_id=evidence.job_id,
        attempt=evidence.attempt.attempt if evidence.attempt else None,
        note=_join(cause, *troubles, *(f"ALARM: {finding.text}" for finding in evidence.findings if finding.is_alarm)),
        cause=cause,
        troubles=troubles,
        numbers=headline(metrics),
        pace=pace_of(lines),
        metrics=metrics,
        workers=rows,
        groups=group_rows(evidence, rows),
        waits=find_waits(rows) if evidence.records is not None else (),
        history=evidence.history,
        findings=evidence.findings,
        watch=findings_of(lines, trial=facts.name),
        node_list=job.nodes if job else "",
        time_left=job.time_left if job and job.phase is JobPhase.RUNNING else "",
        ended_at=ended_at,
    )


def judge(evidence: Evidence, rows: Sequence[WorkerRow] | None = None) -> tuple[TrialState, str]:
    """One word for the trial, and what explains it. Pure."""
    if evidence.attempt is None:
        name = f"{evidence.facts.experiment}/{evidence.facts.trial}"
        return TrialState.UNKNOWN, f"rl-submit made it and did not start it; rl-submit --resume {name} starts it"
    rows = worker_rows(evidence) if rows is None else rows
    if evidence.ended is not None:
        return TrialState(evidence.ended.state), evidence.ended.cause
    if has_jobs(evidence.facts.mode):
        return _judge_on_cluster(evidence, rows)
    if evidence.is_supervised:
        return _judge_running(evidence, rows)
    if evidence.now - evidence.attempt.submitted_at < _FIRST_START_S and not evidence.redis_started:
        return TrialState.STARTING, "the supervisor is starting"
    return _judge_without_record(evidence, "its supervisor has ended and recorded no end; see rl-logs --errors")


def _judge_on_cluster(evidence: Evidence, rows: Sequence[WorkerRow]) -> tuple[TrialState, str]:
    if evidence.job is not None:
        state, note = _judge_by_job(evidence, rows)
    elif evidence.queue.error and evidence.queue.asked_at is None:
        if not _has_fresh_beat(rows):
            return TrialState.UNKNOWN, f"the cluster cannot be asked: {evidence.queue.error}"
        state, note = _judge_running(evidence, rows)
    else:
        state, note = _judge_without_job(evidence, rows)
    if evidence.queue.error and evidence.queue.unreachable_since is not None:
        since = format_moment(evidence.queue.unreachable_since)
        note = _join(note, f"cluster unreachable since {since}, this is the last that is known")
    return state, note


def _judge_by_job(evidence: Evidence, rows: Sequence[WorkerRow]) -> tuple[TrialState, str]:
    job = evidence.job
    assert job is not None and evidence.attempt is not None
    state = job.state
    if state is TrialState.RUNNING:
        if evidence.attempt_ended is not None:
            return TrialState.STARTING, f"attempt {evidence.attempt.attempt + 1} starts in job {job.job_id}"
        return _judge_running(evidence, rows)
    if state in FINAL_STATES:
        return _judge_ended_job(evidence, state, job.note)
    if state in NOT_STARTED and (evidence.attempt_ended is not None or evidence.has_run):
        waits = f"attempt {evidence.attempt.attempt + 1} waits in job {job.job_id}"
        before = f"attempt {evidence.attempt.attempt} {_how_attempt_ended(evidence)}"
        return state, _join(f"{waits}, {job.note}" if job.note else waits, before)
    return state, job.note


def _judge_ended_job(evidence: Evidence, state: TrialState, note: str) -> tuple[TrialState, str]:
    """The cluster says that the job is over, and the supervisor wrote no end."""
    if evidence.is_done:
        return TrialState.COMPLETE, ""
    request = evidence.stop_request
    is_asked = request is not None and not request.state  # with a state, a supervisor asked on account of its job
    if evidence.is_stopped and (state is not TrialState.CANCELLED or is_asked):
        return TrialState.STOPPED, ""
    job = evidence.job
    if state is TrialState.FAILED and (failed := evidence.failure) is not None:
        where = f" on {failed.node}" if failed.node else ""
        note = _join(f"{failed.who} {failed.why}{where}", note)
        state = TrialState.OOM if failed.code == WorkerExit.OUT_OF_MEMORY else state
    if state is TrialState.NODE_FAILED:
        failed_nodes = ",".join(node for end in evidence.history for node in end.nodes)
        note = f"{failed_nodes or (job.nodes if job else '') or 'a node'}: {note}"
    return state, note


def _judge_without_job(evidence: Evidence, rows: Sequence[WorkerRow]) -> tuple[TrialState, str]:
    """The cluster has forgotten the job: our records, then accounting, then heartbeats."""
    attempt_ended = evidence.attempt_ended
    if evidence.is_done or evidence.is_stopped:
        return _judge_without_record(evidence, "")
    if attempt_ended is not None:
        state = TrialState(attempt_ended.state)
        why = f"attempt {attempt_ended.attempt} {_how_attempt_ended(evidence)}, and no job is there to go on"
        return (state if state in FINAL_STATES else TrialState.LOST), f"{why}; continue with rl-submit --resume"
    if evidence.accounted is not None and (state := evidence.accounted.state) in FINAL_STATES:
        return state, evidence.accounted.note
    if _has_fresh_beat(rows):
        state, note = _judge_running(evidence, rows)
        return state, _join(note, "the cluster does not know its job any more, but its workers speak")
    return _judge_without_record(evidence, "the cluster does not know its job any more")


def _judge_without_record(evidence: Evidence, why: str) -> tuple[TrialState, str]:
    """The supervisor is gone and wrote no end, but the trial log may know."""
    if evidence.is_done:
        return TrialState.COMPLETE, ""
    if evidence.is_stopped:
        return TrialState.STOPPED, ""
    return TrialState.LOST, f"{why}; continue with rl-submit --resume"


def _judge_running(evidence: Evidence, rows: Sequence[WorkerRow]) -> tuple[TrialState, str]:
    if evidence.is_done:
        return TrialState.STOPPING, "done; the workers are ending"
    if evidence.is_stopped or evidence.stop_request is not None:
        return TrialState.STOPPING, f"asked by {evidence.stop_request.by}" if evidence.stop_request is not None else ""
    if evidence.records is None:
        if not evidence.redis_started:
            failed = evidence.view.failed_start()
            return (TrialState.DEGRADED, failed) if failed else (TrialState.STARTING, "Redis is starting")
        return TrialState.DEGRADED, "Redis does not answer; workers cannot be seen"
    troubled = sorted((row for row in rows if row.state in TROUBLED), key=lambda row: TROUBLED.index(row.state))
    master = next((row for row in troubled if row.worker == MASTER), None)
    if master is not None and master.state in (WorkerState.SILENT, WorkerState.MISSING):
        return TrialState.UNRESPONSIVE, trouble(evidence, master)
    if troubled:
        more = f" (and {len(troubled) - 1} more)" if len(troubled) > 1 else ""
        return TrialState.DEGRADED, trouble(evidence, troubled[0]) + more
    return _judge_readiness(evidence, rows)


def _judge_readiness(evidence: Evidence, rows: Sequence[WorkerRow]) -> tuple[TrialState, str]:
    given_up = [row for row in rows if row.state is WorkerState.GIVEN_UP]
    if given_up:
        return TrialState.DEGRADED, f"goes on without {given_up[0].worker}: {evidence.given_up[given_up[0].worker]}"
    needed = [row for row in rows if row.state not in ABSENT or not _may_be_absent(evidence, row)]
    ready = sum(row.state is WorkerState.UP for row in needed)
    if ready < len(needed):
        text = f"{ready} of {len(needed)} workers are ready"
        away = [row.worker for row in needed if row.state is WorkerState.AWAY]
        waiting = next((one for one in evidence.extra_jobs if not set(away).isdisjoint(one.workers)), None)
        if waiting is not None:
            text = f"{text}; {waiting.allocation} waits: {describe_extra_job(waiting)}"
        # A worker that has run in this attempt, and whose nodes are gone.
        is_degraded = any(evidence.lives[worker].ended_at is not None for worker in away)
        return (TrialState.DEGRADED if is_degraded else TrialState.STARTING), text
    return TrialState.RUNNING, ""


def _may_be_absent(evidence: Evidence, row: WorkerRow) -> bool:
    """Elastic workers come and go; what rl-stop keeps down and what was given up is not waited for."""
    if row.state is not WorkerState.AWAY:
        return True
    extra_job = evidence.extra_job_of(row.worker)
    return extra_job is None or extra_job.is_elastic


def _has_fresh_beat(rows: Sequence[WorkerRow]) -> bool:
    return any(
        row.state is WorkerState.UP and row.last_seen_s is not None and row.last_seen_s < _FRESH_BEAT_S for row in rows
    )


def _how_attempt_ended(evidence: Evidence) -> str:
    ended = evidence.attempt_ended
    if ended is None:
        return "ended without a word"
    return f"ended {ended.state}" + (f" ({ended.cause})" if ended.cause else "")


def _reported_troubles(evidence: Evidence) -> Iterator[str]:
    """The troubles of other workers that workers report."""
    for worker, record in (evidence.records or {}).items():
        for one in record.troubles:
            since, see = format_duration(one.for_s), f"see rl-logs {evidence.facts.name} {worker}"
            yield f"{one.worker}, for {since}: {one.text}; {see}"


def _failing_trackers(evidence: Evidence) -> Iterator[str]:
    """Of trackers that were given up, or that failed and have not run for long since."""
    facts = evidence.facts
    for index, name in enumerate(facts.trackers):
        tracker = f"tracker/{index}"
        life, see = evidence.lives.get(tracker, WorkerLife()), f"see rl-logs {facts.name} {tracker}"
        is_new = evidence.trial_now - (life.started_at or 0.0) < facts.healthy_after_s
        if cause := evidence.given_up.get(tracker):
            yield f"nothing goes to {name} any more: {cause}; {see}, rl-track makes up for it"
        elif life.failure and (life.exit or is_new):
            again = "" if evidence.ended is not None else f", restart {life.restarts}"
            yield f"tracker {name} failed{again}: {life.failure}; {see}"


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
