"""How trials stand: facts from the trial directory, Redis and squeue go in, one word and a row per worker come out.

    journal, trial log, stop request --+
    lock of the supervisor (local) ----+--> Evidence --judge (pure)--> TrialStatus
    squeue, one call for all (SLURM) --+
    leases in Redis -------------------+

Redis and SLURM may know nothing, now or any more: what they cannot say is left out, never an error. The states:

    QUEUED BLOCKED HELD REQUEUED   not started by SLURM
    STARTING RUNNING DEGRADED UNRESPONSIVE STOPPING SUSPENDED
    COMPLETE STOPPED FAILED        the trial's own record of its end
    CANCELLED TIMED_OUT NODE_FAILED PREEMPTED OOM     SLURM's word, where the trial could not leave one
    LOST                           it ended without a word    UNKNOWN   nobody can say
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from corral.experiments.attempts import AttemptRecord
from corral.launcher.metrics import headline, last_metrics
from corral.launcher.slurm import QueuedJob
from corral.launcher.slurm_states import judge_job
from corral.launcher.trials import TrialFacts

FINAL_STATES = frozenset(
    {"COMPLETE", "STOPPED", "FAILED", "CANCELLED", "TIMED_OUT", "NODE_FAILED", "PREEMPTED", "OOM", "LOST"}
)
MASTER = "master_worker/0"
_SETTING_UP = ("starting", "setup")
_FIRST_START_S = 15.0  # between rl-submit's record and the supervisor's lock
_MASTER_START_S = 60.0
_SILENT_TTLS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLife:
    """What the journal knows about one worker in the last attempt."""

    pid: int | None = None
    node: str = ""
    started_at: float | None = None
    restarts: int = 0
    exit: str = ""
    """How its last process ended, while no newer one was started."""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known about a trial at one moment."""

    facts: TrialFacts
    now: float
    attempt: AttemptRecord | None
    lives: Mapping[str, WorkerLife]
    ended: Mapping[str, Any] | None
    """The last attempt's own record of its end."""
    redis_started: bool
    is_done: bool
    is_stopped: bool
    stop_requested_by: str | None
    is_supervised: bool | None
    """Whether the supervisor runs; None if that cannot be seen from here."""
    job: QueuedJob | None
    job_id: str
    slurm_error: str
    records: Mapping[str, Mapping[str, Any]] | None
    """Worker records by worker; None if Redis cannot be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """One worker, as rl-status shows it."""

    worker: str
    state: str
    pid: int | None
    node: str
    phase: str
    phase_s: float | None
    version: str
    restarts: int
    last_seen_s: float | None
    waiting_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStatus:
    """One trial, as rl-status shows it."""

    experiment: str
    trial: str
    directory: str
    mode: str
    state: str
    step: int | None
    total_steps: int | None
    age_s: float | None
    nodes: int | None
    job_id: str
    attempt: int | None
    note: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    workers: Sequence[WorkerRow] = ()

    @property
    def is_final(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.state in FINAL_STATES


def describe(evidence: Evidence) -> TrialStatus:
    """The status that the evidence supports. Pure."""
    facts = evidence.facts
    state, note = judge(evidence)
    metrics = last_metrics(facts.directory.metrics_path)
    submitted_at = evidence.attempt.submitted_at if evidence.attempt else None
    end = float(evidence.ended["time"]) if evidence.ended else evidence.now
    nodes = {life.node for life in evidence.lives.values() if life.node}
    return TrialStatus(
        experiment=facts.experiment,
        trial=facts.trial,
        directory=str(facts.directory.path),
        mode=facts.mode,
        state=state,
        step=metrics.get("step"),
        total_steps=facts.total_steps,
        age_s=max(0.0, end - submitted_at) if submitted_at is not None else None,
        nodes=len(nodes) or None,
        job_id=evidence.job_id,
        attempt=evidence.attempt.attempt if evidence.attempt else None,
        note=note or (headline(metrics) if state in ("RUNNING", "COMPLETE") else ""),
        metrics=metrics,
        workers=[_worker_row(evidence, worker) for worker in facts.workers],
    )


def judge(evidence: Evidence) -> tuple[str, str]:
    """One word for the trial, and what explains it. Pure."""
    if evidence.attempt is None:
        return "UNKNOWN", "it was never started; submit it again under another name"
    if evidence.ended is not None:
        return str(evidence.ended["state"]), str(evidence.ended.get("cause") or "")
    if evidence.facts.mode == "slurm":
        return _judge_on_slurm(evidence)
    if evidence.is_supervised:
        return _judge_running(evidence)
    if evidence.now - evidence.attempt.submitted_at < _FIRST_START_S and not evidence.redis_started:
        return "STARTING", "the supervisor is starting"
    return _judge_without_record(evidence, "its supervisor ended without a word")


def _judge_on_slurm(evidence: Evidence) -> tuple[str, str]:
    if evidence.slurm_error:
        return "UNKNOWN", f"SLURM cannot be asked: {evidence.slurm_error}"
    if evidence.job is None:
        return _judge_without_record(evidence, "SLURM does not know its job any more")
    verdict = judge_job(evidence.job.state, evidence.job.reason, start=evidence.job.start)
    if verdict.state == "RUNNING":
        return _judge_running(evidence)
    if verdict.state in FINAL_STATES and (evidence.is_done or (evidence.is_stopped and verdict.state != "CANCELLED")):
        return _judge_without_record(evidence, verdict.note)
    return verdict.state, verdict.note


def _judge_without_record(evidence: Evidence, why: str) -> tuple[str, str]:
    """The supervisor is gone and wrote no end, but the trial log may know."""
    if evidence.is_done:
        return "COMPLETE", ""
    if evidence.is_stopped:
        return "STOPPED", ""
    return "LOST", f"{why}; continue with rl-submit --resume"


def _judge_running(evidence: Evidence) -> tuple[str, str]:
    if evidence.is_done:
        return "STOPPING", "done; the workers are ending"
    if evidence.is_stopped or evidence.stop_requested_by:
        return "STOPPING", f"asked by {evidence.stop_requested_by}" if evidence.stop_requested_by else ""
    if evidence.records is None:
        if not evidence.redis_started:
            return "STARTING", "Redis is starting"
        return "DEGRADED", "Redis does not answer; workers cannot be seen"
    rows = [_worker_row(evidence, worker) for worker in evidence.facts.workers]
    troubled = [row for row in rows if row.state in ("SILENT", "RESTARTING", "DOWN", "MISSING")]
    master = next((row for row in troubled if row.worker == MASTER), None)
    if master is not None and master.state in ("SILENT", "MISSING"):
        return "UNRESPONSIVE", _trouble(evidence, master)
    if troubled:
        more = f" (and {len(troubled) - 1} more)" if len(troubled) > 1 else ""
        return "DEGRADED", _trouble(evidence, troubled[0]) + more
    ready = sum(row.state == "UP" for row in rows)
    if ready < len(rows):
        return "STARTING", f"{ready} of {len(rows)} workers are ready"
    return "RUNNING", ""


def _trouble(evidence: Evidence, row: WorkerRow) -> str:
    where = f" on {row.node}" if row.node else ""
    life = evidence.lives[row.worker]
    if row.state == "SILENT":
        return f"{row.worker} silent {row.last_seen_s:.0f}s{where}"
    if row.state == "MISSING":
        return f"{row.worker} runs{where} but has no record; see rl-logs {evidence.facts.name} {row.worker}"
    return f"{row.worker} restarting{where}" + (f" after {life.exit}" if life.exit else f" (restart {row.restarts})")


def _worker_row(evidence: Evidence, worker: str) -> WorkerRow:
    life = evidence.lives[worker]
    record = (evidence.records or {}).get(worker)
    beat = _number(record, "beat") or _number(record, "phase_since")
    last_seen_s = max(0.0, evidence.now - beat) if beat is not None else None
    if last_seen_s is None and life.ended_at is not None:
        last_seen_s = max(0.0, evidence.now - life.ended_at)
    since = _number(record, "phase_since")
    return WorkerRow(
        worker=worker,
        state=_worker_state(evidence, life, record, last_seen_s),
        pid=int(record["pid"]) if record and isinstance(record.get("pid"), int) else life.pid,
        node=str((record or {}).get("node") or life.node),
        phase=str((record or {}).get("phase") or ""),
        phase_s=max(0.0, evidence.now - since) if since is not None else None,
        version=str((record or {}).get("version") or ""),
        restarts=life.restarts,
        last_seen_s=last_seen_s,
        waiting_for=str((record or {}).get("waiting_for") or ""),
    )


def _worker_state(
    evidence: Evidence, life: WorkerLife, record: Mapping[str, Any] | None, last_seen_s: float | None
) -> str:
    if evidence.records is None:
        return f"ENDED ({life.exit})" if life.exit else "UNKNOWN" if life.started_at else "-"
    facts = evidence.facts
    if record is None:
        if life.started_at is None or (life.exit and life.restarts == 0 and not life.started_at):
            return "STARTING"
        if life.exit or life.restarts:
            return "RESTARTING"
        patience_s = _MASTER_START_S if facts.workers and life is evidence.lives.get(MASTER) else facts.setup_timeout_s
        return "STARTING" if evidence.now - life.started_at < patience_s else "MISSING"
    if last_seen_s is not None and last_seen_s > _SILENT_TTLS * facts.lease_ttl_s:
        return "SILENT"
    if record.get("phase") in _SETTING_UP:
        return "RESTARTING" if life.restarts else "STARTING"
    return "UP"


def _number(record: Mapping[str, Any] | None, name: str) -> float | None:
    value = record.get(name) if record else None
    return float(value) if isinstance(value, int | float) else None
