"""rl-status --explain: the facts behind each word, and the command that shows them. Pure."""

import time
from collections.abc import Iterator

from corral.experiments.trial.mode import has_jobs
from corral.launcher.cluster.cached_queue import QueueAnswer
from corral.launcher.status.evidence import Evidence
from corral.launcher.status.judge import TrialStatus
from corral.launcher.terminal import printable

_INDENT = "  "


def explain(evidence: Evidence, status: TrialStatus, answer: QueueAnswer) -> str:
    """Several lines: the word, then what the trial recorded, what the cluster said, and what Redis holds."""
    lines = [f"why {status.state}" + (f": {status.note}" if status.note else "")]
    lines += [f"{_INDENT}{line}" for line in _own_records(evidence)]
    if has_jobs(evidence.facts.mode):
        lines += [f"{_INDENT}{line}" for line in _cluster(evidence, answer)]
    lines += [f"{_INDENT}{line}" for line in _redis(evidence, status)]
    return "\n".join(printable(line) for line in lines)


def _own_records(evidence: Evidence) -> Iterator[str]:
    directory = evidence.facts.directory
    if evidence.ended is not None:
        yield f"{directory.journal_path}: trial_ended {evidence.ended['state']}, {_at(evidence.ended['time'])}"
        if evidence.failure is not None:
            failed = evidence.failure
            yield f"{directory.exits_path}: {failed['worker']} ended with {failed['returncode']}, the first to fail"
        return
    if evidence.attempt is not None:
        yield f"attempt {evidence.attempt.attempt} was submitted {_at(evidence.attempt.submitted_at)}"
    if evidence.attempt_ended is not None:
        ended = evidence.attempt_ended
        yield f"{directory.journal_path}: attempt_ended {ended.get('state')} {ended.get('cause') or ''}".rstrip()
    if evidence.is_done or evidence.is_stopped:
        yield f"{directory.log_path}: the trial log ends with {'Done' if evidence.is_done else 'Stop'}"
    if evidence.stop_request is not None:
        yield f"{directory.stop_request_path}: asked to stop by {evidence.stop_request.by}"
    if evidence.is_supervised is not None:
        yield f"the supervisor's lock is {'held: it runs' if evidence.is_supervised else 'free: it does not run'}"


def _cluster(evidence: Evidence, answer: QueueAnswer) -> Iterator[str]:
    if answer.question:
        yield f"$ {answer.question}"
    if answer.error:
        yield f"{_INDENT}no answer: {answer.error}"
    if answer.asked_at is not None:
        yield f"{_INDENT}asked {_at(answer.asked_at)}, {len(answer.jobs)} job{'' if len(answer.jobs) == 1 else 's'}"
    elif not answer.error:
        yield f"{_INDENT}not asked: the trial's own record of its end is enough"
    job = evidence.job
    if job is not None:
        yield f"{_INDENT}{job.line}"
        yield f"{_INDENT}state {job.word}, reason {job.reason}; see: scontrol show job {job.job_id}"
    elif answer.asked_at is not None and evidence.job_id:
        yield f"{_INDENT}job {evidence.job_id} is not among them, nor known any more"
    for found in (*(job.findings if job else ()), *(evidence.accounted.findings if evidence.accounted else ())):
        yield f"{_INDENT}{found}"
    for extra_job in evidence.extra_jobs:
        if extra_job.job is not None:
            yield f"{_INDENT}{extra_job.allocation}: {extra_job.job.line}"


def _redis(evidence: Evidence, status: TrialStatus) -> Iterator[str]:
    if evidence.ended is not None:
        return
    if evidence.records is None:
        yield "Redis: not there, or not asked"
        return
    yield f"Redis: {len(evidence.records)} of {len(status.workers)} workers hold a lease"
    for row in status.workers:
        beat = "never seen" if row.last_seen_s is None else f"last beat {row.last_seen_s:.1f}s ago"
        lease = "leased" if row.worker in evidence.records else "no lease"
        yield f"{_INDENT}{row.worker} {row.state}: {lease}, {beat}, {row.restarts} restarts"


def _at(moment: object) -> str:
    seconds = float(moment) if isinstance(moment, int | float) else 0.0
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
