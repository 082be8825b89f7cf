"""The evidence about a trial at one moment, as plain data: the reader fills it in, the judges only look at it.

jobs of OwnJobs --find_jobs--+-- allocation head: this attempt's job, its successor, or a zombie of an earlier one
                             +-- another allocation: an extra job
jobs whose trial directory is gone --find_strays--> nobody's, but still ours

How workers stand: the journal, leases and last records of a trial become a row per worker and a row per group. Pure.

no lease, no exit, a last record --> SILENT since that record: the process is there and does not speak
lease, its beat older than three beats --> SILENT
no lease, an exit or a restart --> RESTARTING       its job is in the queue --> AWAY
lease, not in setup --> UP                          rl-stop --group --> KEPT DOWN
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corral.experiments.trial.attempts import AttemptEnd, AttemptRecord
from corral.experiments.trial.directory import StopRequest
from corral.experiments.trial.worker_record import LEASE_TTL_S, MASTER, WeightUpdate, WorkerRecord
from corral.launcher.slurm.job_queue import QueueAnswer
from corral.launcher.slurm.own_jobs import HEAD, JobIndex, OwnJobs
from corral.launcher.slurm.verdict import Job, JobPhase
from corral.launcher.terminal import first_few, format_duration
from corral.launcher.trial.ends import End
from corral.launcher.trial.view import Finding, PastAttempt, TrialFacts, TrialView, WorkerLife
from corral.launcher.trial.words import TROUBLED, WorkerState
from corral.scheduling.policy_version import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraJob:
    """A job of the trial beside its head: that of a group, or of one elastic worker."""

    allocation: str
    """Name in the layout: a kind of worker, or a worker."""
    is_elastic: bool
    job: Job | None
    """None while it is in no queue."""
    workers: tuple[str, ...] = ()
    """That run in it."""

    @property
    def is_running(self) -> bool:
        """Whether it has its nodes."""
        return self.job is not None and self.job.phase is JobPhase.RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known about a trial at one moment."""

    facts: TrialFacts
    now: float
    attempt: AttemptRecord | None
    lives: Mapping[str, WorkerLife]
    view: TrialView = TrialView(())
    """The files that say how attempts went."""
    ended: AttemptEnd | None = None
    """The trial's own record of its end."""
    redis_started: bool
    is_done: bool = False
    is_stopped: bool = False
    stop_request: StopRequest | None = None
    is_supervised: bool | None = None
    """Whether the supervisor runs; None if that cannot be seen from here."""
    job: Job | None = None
    """The head's job: that of the last attempt, or of the one that is to follow it."""
    job_id: str
    submitted_at: float = 0.0
    """When its last job was submitted: what the cluster said before does not count."""
    queue: QueueAnswer = QueueAnswer()
    """The cluster's answer about all jobs."""
    records: Mapping[str, WorkerRecord] | None = None
    """Worker records by worker; None if Redis cannot be asked."""
    last_seen: Mapping[str, WorkerRecord] = field(default_factory=dict)
    """The last record of each worker, which outlives its lease."""
    redis_now: float | None = None
    """The moment of the records by the clock of Redis, which is that of their beats."""
    attempt_ended: AttemptEnd | None = None
    """The last attempt's record of its end, where another one is to follow."""
    has_run: bool = False
    """Whether the job has run before: the cluster, or the supervisor, has put the trial back into the queue."""
    accounted: Job | None = None
    """The accounting record of a job that the cluster has forgotten."""
    extra_jobs: tuple[ExtraJob, ...] = ()
    groups_kept_down: frozenset[str] = frozenset()
    """Kinds of worker that rl-stop keeps down."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """Workers and trackers that the trial goes on without, and why."""
    zombies: tuple[str, ...] = ()
    """Processes of another attempt that still live."""
    failure: End | None = None
    """The end of the task that ended a trial that failed."""
    history: tuple[PastAttempt, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What train steps have found out."""
    damage: tuple[str, ...] = ()
    """Damage of the trial's files, and the remedy."""

    @property
    def trial_now(self) -> float:
        """The moment by the clock of the trial's own processes, where that is known: supervisor and Redis share it."""
        return self.now if self.redis_now is None else self.redis_now

    @property
    def attempt_number(self) -> int:
        """Of the last attempt; 0 before the first."""
        return self.attempt.attempt if self.attempt else 0

    def extra_job_of(self, worker: str) -> ExtraJob | None:
        """The extra job that a worker runs in."""
        return next((extra_job for extra_job in self.extra_jobs if worker in extra_job.workers), None)


_HEADS = (None, "", HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJobs:
    """The jobs of one trial."""

    head: Job | None
    """The job of the last attempt, or of the one that is to follow it."""
    extra_jobs: Mapping[str, Job]
    """By allocation; the newest."""
    zombies: tuple[Job, ...]
    """Jobs of earlier attempts that still run, or are going to."""


def find_jobs(jobs: JobIndex, own: OwnJobs, *, job_id: str, is_over: bool) -> TrialJobs:
    """Sorts a trial's jobs out.

    Args:
        jobs: everybody's.
        job_id: of the last attempt; "" if it is not known.
        is_over: whether that attempt has ended, so that another job may be waiting to go on.
    """
    ours = [(job, note) for job, note in own.select(jobs) if not job.part_of]  # the first one stands for all
    heads = sorted((job for job, note in ours if note.allocation == HEAD), key=lambda job: job.number)
    head = _choose_head(heads, job_id, is_over=is_over)
    extra_jobs: dict[str, Job] = {}
    zombies = [
        job for job in heads if job is not head and job.job_id != job_id and job.is_staying and _is_older(job, head)
    ]
    beside = [(job, note) for job, note in ours if note.allocation != HEAD]
    for job, note in sorted(beside, key=lambda one: (one[0].is_staying, one[0].number)):
        if note.allocation in extra_jobs and extra_jobs[note.allocation].is_staying:
            zombies.append(extra_jobs[note.allocation])
        extra_jobs[note.allocation] = job
    return TrialJobs(head=head, extra_jobs=extra_jobs, zombies=tuple(zombies))


def find_strays(jobs: Iterable[Job], known: Collection[str]) -> list[tuple[Job, Path]]:
    """Living head jobs of trials that are none of the known, by their uuids, with the directories that they name."""
    return [
        (job, Path(str(job.tag.get("directory"))))
        for job in jobs
        if job.tag.get("trial_uuid")
        and job.tag["trial_uuid"] not in known
        and job.tag.get("allocation") in _HEADS
        and not job.part_of
        and job.is_active
    ]


def is_of_trial(job: Job, name: str, fileroot: Path) -> bool:
    """Whether a job says that it is of the trial that somebody calls so: by its name, experiment/trial, or its path."""
    directory, path = Path(str(job.tag.get("directory", "/"))), Path(os.path.expanduser(name))
    if name.startswith(("/", ".", "~")):
        return directory == path.absolute()
    return directory.parents[1:2] == (fileroot.absolute(),) and name in (
        directory.name,
        f"{directory.parent.name}/{directory.name}",
    )


def _choose_head(heads: Sequence[Job], job_id: str, *, is_over: bool) -> Job | None:
    own = next((job for job in heads if job.job_id == job_id), None)
    if own is not None and own.is_active and (not is_over or own.phase is JobPhase.WAITING):
        return own
    living = [job for job in heads if job.is_active and job is not own]
    newer = [job for job in living if own is None or job.number > own.number]
    if newer:
        return newer[-1]
    return own if own is not None or job_id else (heads[-1] if heads else None)


def _is_older(job: Job, head: Job | None) -> bool:
    return head is None or job.number < head.number or not head.is_active


_MASTER_START_S = 60.0
_SILENT_S = 6.5  # a beat moves every two seconds, so three of them are missing
_SILENT_TTLS = 3.0  # while it sets up: an import may hold the interpreter for long
_MANY = 4
_MILLISECONDS_BELOW_S = 0.1  # below which seconds with two digits say too little


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """One worker, as rl-status shows it."""

    worker: str
    state: WorkerState
    pid: int | None
    node: str
    phase: str = ""
    phase_s: float | None = None
    version: str = ""
    weight_update: WeightUpdate | None = None
    """Of a generation server, what its last one has cost."""
    restarts: int
    last_seen_s: float | None
    waiting_for: str = ""
    waits_for: tuple[str, ...] = ()
    works_with: tuple[str, ...] = ()
    exit: str = ""
    """How its last process ended, while there is no newer one."""

    @property
    def kind(self) -> str:
        """The part before the slash."""
        return self.worker.partition("/")[0]

    @property
    def index(self) -> str:
        """The part after it."""
        return self.worker.partition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """All workers of one kind, as rl-status shows them."""

    group: str
    ready: int | None
    """None where the trial has ended: nobody is to be ready."""
    total: int
    restarts: int
    nodes: tuple[str, ...]
    last_seen_s: float | None
    """Of the worker that was seen last."""
    note: str


def worker_rows(evidence: Evidence) -> list[WorkerRow]:
    """A row for every worker of the plan."""
    return [_worker_row(evidence, worker) for worker in evidence.facts.workers]


def group_rows(evidence: Evidence, rows: Sequence[WorkerRow]) -> list[GroupRow]:
    """A row for every kind of worker, in the order of the plan."""
    kinds = dict.fromkeys(row.kind for row in rows)
    return [_group_row(evidence, kind, [row for row in rows if row.kind == kind]) for kind in kinds]


def trouble(evidence: Evidence, row: WorkerRow) -> str:
    """The trouble of a worker, in a few words."""
    where = f" on {row.node}" if row.node else ""
    if row.state is WorkerState.SILENT:
        return f"{row.worker} silent {format_duration(row.last_seen_s or 0.0)}{where}"
    if row.state is WorkerState.MISSING:
        return f"{row.worker} runs{where} but has no record; see rl-logs {evidence.facts.name} {row.worker}"
    life = evidence.lives[row.worker]
    ended = life.last_end or life.exit
    why = f" after {ended}" if ended else f" (restart {row.restarts})"
    return f"{row.worker} restarting{where}{why}" + (f": {row.waiting_for}" if row.waiting_for else "")


def describe_extra_job(extra_job: ExtraJob) -> str:
    """The state of an extra job: `job 12 QUEUED: Resources: ...`."""
    if extra_job.job is None:
        return "its job is to be submitted again"
    return f"job {extra_job.job.job_id} {extra_job.job.state}" + (
        f": {extra_job.job.note}" if extra_job.job.note else ""
    )


def _worker_row(evidence: Evidence, worker: str) -> WorkerRow:
    life = evidence.lives[worker]
    record = _own((evidence.records or {}).get(worker), evidence, life)
    memory = record or _own(evidence.last_seen.get(worker), evidence, life)
    seen_at = memory.beat if memory is not None else life.ended_at
    last_seen_s = max(0.0, evidence.trial_now - seen_at) if seen_at is not None else None
    state = _worker_state(evidence, worker, record=record, memory=memory, last_seen_s=last_seen_s)
    known = memory or WorkerRecord(phase="")
    return WorkerRow(
        worker=worker,
        state=state,
        pid=known.pid or life.pid,
        node=known.node or life.node,
        phase=known.phase,
        phase_s=known.in_phase_s + (last_seen_s or 0.0) if memory is not None else None,
        restarts=life.restarts + known.restarts,
        last_seen_s=last_seen_s,
        exit=life.exit,
        version=known.version,
        weight_update=known.weight_update,
        waiting_for=known.waiting_for,
        waits_for=known.waits_for,
        works_with=known.works_with,
    )


def _own(record: WorkerRecord | None, evidence: Evidence, life: WorkerLife) -> WorkerRecord | None:
    """The record, if it is of this attempt and of the process that was started last, and that has not ended since.

    A lease outlives its holder by its ttl: the end that the supervisor has seen counts, and not what is leased still.
    """
    if life.exit:
        return None
    if record is None or evidence.attempt is None:
        return record
    if record.attempt != evidence.attempt.attempt:
        return None
    is_other = bool(life.incarnation) and bool(record.incarnation) and record.incarnation != life.incarnation
    return None if is_other else record


def _worker_state(
    evidence: Evidence,
    worker: str,
    *,
    record: WorkerRecord | None,
    memory: WorkerRecord | None,
    last_seen_s: float | None,
) -> WorkerState:
    life = evidence.lives[worker]
    if evidence.records is None:
        if life.exit:
            return WorkerState.ENDED
        return WorkerState.UNKNOWN if life.started_at else WorkerState.NOT_STARTED
    is_ending = evidence.is_done or evidence.is_stopped or evidence.stop_request is not None
    if record is None and life.exit and is_ending:  # nobody starts it again
        return WorkerState.ENDED
    if worker in evidence.given_up:
        return WorkerState.GIVEN_UP
    if record is None and worker.partition("/")[0] in evidence.groups_kept_down:
        return WorkerState.KEPT_DOWN
    if memory is not None:
        patience_s = _SILENT_TTLS * LEASE_TTL_S if memory.is_setting_up else _SILENT_S
        if last_seen_s is not None and last_seen_s > patience_s:
            return WorkerState.AWAY if record is None and _are_nodes_gone(evidence, worker) else WorkerState.SILENT
        if memory.is_setting_up or record is None:
            return WorkerState.RESTARTING if life.restarts + memory.restarts else WorkerState.STARTING
        return WorkerState.UP
    if _are_nodes_gone(evidence, worker):
        return WorkerState.AWAY
    if life.started_at is None:
        return WorkerState.STARTING
    if life.exit or life.restarts:
        return WorkerState.RESTARTING
    patience_s = _MASTER_START_S if worker == MASTER else evidence.facts.setup_timeout_s
    return WorkerState.STARTING if evidence.trial_now - life.started_at < patience_s else WorkerState.MISSING


def _are_nodes_gone(evidence: Evidence, worker: str) -> bool:
    """Whether the worker's nodes are those of a job that does not run now."""
    extra_job = evidence.extra_job_of(worker)
    return extra_job is not None and not extra_job.is_running


def _group_row(evidence: Evidence, kind: str, rows: Sequence[WorkerRow]) -> GroupRow:
    seen = [row.last_seen_s for row in rows if row.last_seen_s is not None]
    return GroupRow(
        group=kind,
        ready=sum(row.state is WorkerState.UP for row in rows) if evidence.ended is None else None,
        total=len(rows),
        restarts=sum(row.restarts for row in rows),
        nodes=tuple(dict.fromkeys(row.node for row in rows if row.node)),
        last_seen_s=min(seen, default=None),
        note=_group_note(evidence, kind, rows),
    )


def _group_note(evidence: Evidence, kind: str, rows: Sequence[WorkerRow]) -> str:
    parts = []
    for state in TROUBLED:
        chosen = [row for row in rows if row.state == state]
        if not chosen:
            continue
        detail = f" {format_duration(chosen[0].last_seen_s or 0.0)}" if state is WorkerState.SILENT else ""
        if state is WorkerState.RESTARTING and (ended := evidence.lives[chosen[0].worker].exit):
            detail = f" after {ended}"
        parts.append(f"{_indices(chosen)}: {state.lower()}{detail}")
    if kind in evidence.groups_kept_down:
        parts.append(f"kept down; rl-stop {evidence.facts.name} --group {kind} --undo brings it back")
    if given_up := [row for row in rows if row.state is WorkerState.GIVEN_UP]:
        parts.append(f"{_indices(given_up)}: given up, {evidence.given_up[given_up[0].worker]}")
    parts += _extra_job_notes(evidence, kind)
    if not parts and evidence.ended is None:
        parts += _weight_update_notes(rows)
    return "; ".join(parts)


def _weight_update_notes(rows: Sequence[WorkerRow]) -> list[str]:
    """What the servers of a group have spent on their newest weights: bytes of all, times of the slowest."""
    updates = [row.weight_update for row in rows if row.weight_update is not None]
    if not updates:
        return []
    newest = max(updates, key=lambda update: PolicyVersion.parse(update.version)).version
    updates = [update for update in updates if update.version == newest]
    read = sum(update.bytes_read for update in updates) / 1e6
    received = sum(update.bytes_received for update in updates) / 1e6
    from_hosts = f", {received:.1f} MB from other hosts" if received else ""
    staged_s, stopped_s = max(update.staged_s for update in updates), max(update.stopped_s for update in updates)
    stood_still = f"{stopped_s:.2f} s" if stopped_s >= _MILLISECONDS_BELOW_S else f"{stopped_s * 1e3:.1f} ms"
    return [f"weights {newest}: {read:.1f} MB read{from_hosts}, staged in {staged_s:.2f} s, stood still {stood_still}"]


def _extra_job_notes(evidence: Evidence, kind: str) -> list[str]:
    """What the extra jobs of a group do; those in the same state share a note."""
    indices_by_text: dict[str, list[str]] = {}
    for extra_job in evidence.extra_jobs:
        name, _, index = extra_job.allocation.partition("/")
        if name == kind:
            text = "" if extra_job.is_running and index else describe_extra_job(extra_job)
            indices_by_text.setdefault(text, []).append(index)
    return [
        (f"{','.join(indices)}: {text}" if indices[0] else text) for text, indices in indices_by_text.items() if text
    ]


def _indices(rows: Sequence[WorkerRow]) -> str:
    return first_few([row.index for row in rows], most=_MANY)
