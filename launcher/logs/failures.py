"""rl-logs --errors: the failure that ended the trial, or its newest one without recovery; then all other failures.

    TrialView: ends of tasks, -----+
               nodes that failed, -+--> Incidents in time --cause--> text
               ends of attempts ---+
    logs/      the last lines of a task that ended; what SLURM and the supervisor said last

    rl-status' troubles           what is wrong now: a full disk, a tracker or a server that fails

    ledger/*.json                 prompts that were dropped, with the reason: of an agent or a reward, its file and line

A worker on a node that failed, or in an attempt that SLURM ended, died of that, though its exit was seen first.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from corral.experiments.trial.attempts import AttemptEnd, EndState
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log_state import DROPPED_AS_FILTERED
from corral.experiments.trial.mode import has_jobs
from corral.launcher.terminal import format_moment, printable
from corral.launcher.trial.ends import End, tail_lines
from corral.launcher.trial.lock import is_locked
from corral.launcher.trial.metrics import last_lines
from corral.launcher.trial.view import MAX_COMMITS, TrialView, dropped_prompts

_MAX_FOLLOWED = 20
_MAX_DETAILS = 20
_MAX_UIDS = 5  # of prompts that were dropped for one reason
_OUTSIDE = (EndState.NODE_FAILED, EndState.PREEMPTED, EndState.TIMED_OUT, EndState.CANCELLED)
_SAME_EVENT_S = 60.0  # SLURM tells about a dead node long after its workers were seen to end
_SLURM_LINE = re.compile(
    r"slurmstepd: error|srun: error|oom.kill|exceeded memory limit|DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE)|"
    r"CANCELLED AT|Traceback",
    re.IGNORECASE,
)
_SLURM_TAIL = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that went wrong at one moment."""

    time: float
    who: str
    what: str
    attempt: int | None
    node: str = ""
    is_consequence: bool = False
    is_outside: bool = False
    """Not a worker's own failure."""
    ends_attempt: bool = False
    failed: str = ""
    """The task whose failure ends the attempt: a worker, redis or supervisor."""
    end: End | None = None
    """Of the task."""


def describe_failures(
    view: TrialView, directory: TrialDirectory, *, attempt: int | None, troubles: Sequence[str] = ()
) -> str:
    """What ended an attempt, or the last one, with its last words; then what followed from it, and what healed.

    Args:
        view: of the trial in this directory.
        troubles: what is wrong now besides, as rl-status shows it: a full disk, a tracker that fails.
    """
    incidents = [one for one in find_incidents(view) if attempt in (None, one.attempt)]
    steps = [line["time"] for line in last_lines(directory.metrics_path) if "time" in line]
    cause = find_cause(incidents, view, last_step_at=max(steps, default=0.0))
    of_attempt = "" if attempt is None else f" in attempt {attempt}"
    dropped, alarms = list(_dropped(directory)), list(_alarms(view, attempt))
    if lost := _lost(view, directory, attempt):
        lines = [*lost, *_listed("before:", incidents, since=None)]
    elif cause is not None:
        lines = _describe(cause, incidents, directory)
    elif failures := [one for one in incidents if not one.is_consequence]:
        lines = [f"every failure{of_attempt} has healed; the newest first:"]
        lines += _listed("", failures, since=None)
    else:
        nothing = "no worker has failed" if dropped or alarms or troubles else "nothing has failed"
        lines = [nothing + of_attempt, *_slurm_says(directory)]
    return "\n".join(printable(line) for line in [*(f"trouble: {one}" for one in troubles), *lines, *alarms, *dropped])


def _lost(view: TrialView, directory: TrialDirectory, attempt: int | None) -> list[str]:
    """What is known of a last attempt on this machine whose supervisor is gone and has recorded no end."""
    last = view.record
    if last is None or view.end is not None or has_jobs(last.mode) or attempt not in (None, last.attempt):
        return []
    if is_locked(directory):
        return []
    log = directory.attempt_logs(last.attempt) / "supervisor.log"
    said = tail_lines(log, _MAX_DETAILS) or ["(nothing)"]
    lines = [f"attempt {last.attempt} has no end: its supervisor does not run, and recorded none. Its log ends with:"]
    return [*lines, *(f"  {line}" for line in said)]


def _describe(cause: Incident, incidents: Sequence[Incident], directory: TrialDirectory) -> list[str]:
    of_end = next((one for one in incidents if one.ends_attempt and one.failed == cause.who and one.failed), cause)
    heading = "ended by" if of_end.ends_attempt else "newest failure"
    where = f" on {cause.node}" if cause.node else ""
    of_attempt = "?" if cause.attempt is None else str(cause.attempt)
    lines = [f"{heading}: {cause.who}{where}, {cause.what}, {format_moment(cause.time)}, attempt {of_attempt}"]
    lines += [f"  {line}" for line in (cause.end.last_lines(directory, _MAX_DETAILS) if cause.end else ())]
    if cause.is_outside:
        lines += _slurm_says(directory)
    others = [one for one in incidents if one is not cause and one is not of_end]
    lines += _listed("then:", [one for one in others if one.time >= cause.time], since=cause.time)
    return lines + _listed("before:", [one for one in others if one.time < cause.time][::-1], since=cause.time)


def _listed(heading: str, incidents: Sequence[Incident], *, since: float | None) -> list[str]:
    """A line for each; `since` is the moment that times are counted from, None shows the time of day."""
    if not incidents:
        return []
    lines = [heading] if heading else []
    for one in incidents[:_MAX_FOLLOWED] if since is not None else incidents[: -_MAX_FOLLOWED - 1 : -1]:
        when = format_moment(one.time) if since is None else f"{one.time - since:+.1f}s"
        lines.append(f"  {one.who} {one.what} {when}")
    if len(incidents) > _MAX_FOLLOWED:
        lines.append(f"  ... and {len(incidents) - _MAX_FOLLOWED} more")
    return lines


def _alarms(view: TrialView, attempt: int | None) -> Iterator[str]:
    """Problems that the trainer has found, and goes on with."""
    for finding in replace(view, attempt=view.attempt if attempt is None else attempt).findings():
        if finding.is_alarm:
            yield f"ALARM at step {finding.step}: {finding.text}; {finding.details}"
            yield from (f"  {cause}" for cause in finding.causes)


def _dropped(directory: TrialDirectory) -> Iterator[str]:
    """Prompts that agents, rewards or servers have failed on for good, in all attempts."""
    reasons, is_cut = dropped_prompts(directory)
    uids_by_reason = defaultdict[str, list[str]](list)
    for uid, reason in reasons.items():
        if not reason.startswith(DROPPED_AS_FILTERED):
            uids_by_reason[reason].append(uid)
    if not uids_by_reason:
        return
    only = f" by the last {MAX_COMMITS} commits" if is_cut else ""
    yield f"dropped prompts: {sum(map(len, uids_by_reason.values()))}{only}"
    often_first = sorted(uids_by_reason.items(), key=lambda each: -len(each[1]))
    for reason, uids in often_first[:_MAX_FOLLOWED]:
        more = ", ..." if len(uids) > _MAX_UIDS else ""
        yield f"  {len(uids)} x {reason}: {', '.join(uids[:_MAX_UIDS])}{more}"
    if len(often_first) > _MAX_FOLLOWED:
        yield f"  ... and {len(often_first) - _MAX_FOLLOWED} other reasons"


def find_incidents(view: TrialView) -> list[Incident]:
    """Everything that went wrong, in time. Pure."""
    found = [_incident_of_task(end) for end in view.task_ends if end.code and not end.who.startswith("tracker/")]
    for event in view.events:
        make = partial(Incident, time=float(event["time"]), attempt=event.get("attempt"), is_outside=True)
        cause = str(event.get("cause") or "")
        if event["event"] == "node_failed":
            found.append(make(who="node", what=cause or "failed", node=str(event.get("node") or "")))
        elif event["event"] == "supervisor_failed":
            found.append(make(who="supervisor", what=cause))
    found += [one for end in view.ends.values() if (one := _incident_of_attempt(end)) is not None]
    return sorted(found, key=lambda one: one.time)


def find_cause(incidents: Sequence[Incident], view: TrialView, *, last_step_at: float) -> Incident | None:
    """What ended the last of the attempts, or its newest failure that has not healed; None if all have. Pure.

    Args:
        incidents: in time.
        last_step_at: Unix time of the last train step.
    """
    for one in reversed(incidents):
        if one.ends_attempt and one.failed and one.attempt == max(view.ends):
            own = [each for each in incidents if each.who == one.failed and each.attempt == one.attempt]
            return own[-1] if own else one
    is_complete = view.end is not None and view.end.state is EndState.COMPLETE
    starts: dict[str, float] = {}
    for event in view.events:
        if event["event"] in ("supervisor_started", "redis_started", "worker_started"):
            who = str(event.get("worker") or "supervisor")
            starts[who] = float(event["time"])

    def has_healed(one: Incident) -> bool:
        again = starts.get(one.who, one.time if one.is_outside else 0.0)
        return is_complete or one.time <= again < last_step_at

    causes = [one for one in incidents if not one.is_consequence and not has_healed(one)]
    if not causes or not causes[-1].is_outside:
        return causes[-1] if causes else None
    last = causes[-1]
    close = [one for one in causes if one.is_outside and one.node and last.time - one.time <= _SAME_EVENT_S]
    return close[0] if close and close[0].attempt == last.attempt else last


def _incident_of_task(end: End) -> Incident:
    return Incident(
        time=end.time,
        who=end.who,
        what=end.why,
        attempt=end.attempt,
        node=end.node,
        is_consequence=bool(end.caused_by),
        end=end,
    )


def _incident_of_attempt(end: AttemptEnd) -> Incident | None:
    make = partial(Incident, time=end.ended_at, attempt=end.attempt, ends_attempt=True)
    if end.state.is_failure:
        is_of_supervisor = end.caused_by == "supervisor"
        what = f"{end.state}: {end.cause}"
        return make(who="trial", what=what, failed=end.caused_by or "trial", is_outside=is_of_supervisor)
    if end.state in _OUTSIDE:
        return make(who="attempt", what=f"{end.state}: {end.cause}" if end.cause else end.state, is_outside=True)
    return None


def _slurm_says(directory: TrialDirectory) -> list[str]:
    """What SLURM wrote into the batch steps' logs about failures, each line with its file; nothing if it did not."""
    said = []
    for path in sorted(directory.logs_path.glob("slurm-*.log")):
        lines = tail_lines(path, _SLURM_TAIL)
        shown = [line for line in lines if _SLURM_LINE.search(line)]
        if any("Traceback" in line for line in shown):
            shown = lines[-_MAX_FOLLOWED:]
        said += [f"  {path.name} | {line}" for line in shown[-_MAX_FOLLOWED:]]
    return ["SLURM said:", *said] if said else []
