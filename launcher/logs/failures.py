"""rl-logs --errors: what ended the trial, or the newest failure that it has not recovered from; then all the others.

    exits/*.json                  a worker's exit, the verdict on it --+
    events.jsonl                  a node lost, the supervisor dead, ----+--> Incidents in time --cause--> text
                                  Redis dead, how an attempt ended -----+
    logs/slurm-*.log, supervisor.log   what SLURM and the supervisor said last

    rl-status' troubles           what is wrong now: a full disk, a tracker or a server that fails

    ledger/*.json                 prompts that were dropped, with the reason: of an agent or a reward, its file and line

A worker on a node that failed, or in an attempt that SLURM ended, died of that, though its exit was seen first.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from corral.experiments.trial.attempt_end_record import EndState, read_end
from corral.experiments.trial.attempts import last_attempt
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import read_journal
from corral.experiments.trial.log_state import DROPPED_AS_FILTERED
from corral.experiments.trial.mode import has_jobs
from corral.launcher.terminal import format_moment, printable
from corral.launcher.trial.dropped import MAX_COMMITS, dropped_prompts
from corral.launcher.trial.exits import exit_text, is_out_of_memory, read_exits, tail_lines
from corral.launcher.trial.history import JournalView
from corral.launcher.trial.lock import is_locked
from corral.launcher.trial.metrics import last_lines

_MAX_FOLLOWED = 20
_MAX_DETAILS = 20
_MAX_UIDS = 5  # of prompts that were dropped for one reason
_OUTSIDE = ("NODE_FAILED", "PREEMPTED", "TIMED_OUT", "CANCELLED", "OOM")
_ENDS = ("attempt_ended", "trial_ended")
_STARTED = {"supervisor_started": "supervisor", "redis_started": "redis"}
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
    """What failed, where it ends the attempt: a worker, redis or supervisor."""
    details: tuple[str, ...] = ()


def describe_failures(directory: TrialDirectory, *, attempt: int | None, troubles: Sequence[str] = ()) -> str:
    """What ended an attempt, or the last one, with its last words; then what followed from it, and what healed.

    Args:
        troubles: what is wrong now besides, as rl-status shows it: a full disk, a tracker that fails.
    """
    events = read_journal(directory.journal_path)
    incidents = [one for one in find_incidents(read_exits(directory), events) if attempt in (None, one.attempt)]
    steps = [line["time"] for line in last_lines(directory.metrics_path) if "time" in line]
    cause = find_cause(incidents, events, last_step_at=max(steps, default=0.0))
    of_attempt = "" if attempt is None else f" in attempt {attempt}"
    dropped, alarms = list(_dropped(directory)), list(_alarms(events, attempt))
    if lost := _lost(directory, attempt):
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


def _lost(directory: TrialDirectory, attempt: int | None) -> list[str]:
    """What is known of a last attempt on this machine whose supervisor is gone and has recorded no end."""
    last = last_attempt(directory)
    if last is None or has_jobs(last.mode) or attempt not in (None, last.attempt) or is_locked(directory):
        return []
    if read_end(directory, last.attempt) is not None:
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
    lines += [f"  {line}" for line in cause.details]
    if cause.is_outside:
        lines += _slurm_says(directory)
    same_words = f"FAILED: {cause.who} {cause.what}"
    others = [one for one in incidents if one is not cause and one.what != same_words]
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


def _alarms(events: Sequence[Mapping[str, Any]], attempt: int | None) -> Iterator[str]:
    """What the trainer has found out to be wrong, and goes on with."""
    newest = max((event["attempt"] for event in events if isinstance(event.get("attempt"), int)), default=0)
    for finding in JournalView(events, newest if attempt is None else attempt).findings():
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


def find_incidents(exits: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[Incident]:
    """Everything that went wrong, in time. Pure."""
    found = [_incident_of_exit(record) for record in exits if record["returncode"] != 0]
    found += [one for event in _without_first_words(events) if (one := _incident_of_event(event)) is not None]
    return sorted(found, key=lambda one: one.time)


def find_cause(
    incidents: Sequence[Incident], events: Sequence[Mapping[str, Any]], *, last_step_at: float
) -> Incident | None:
    """What ended the last of the attempts, or its newest failure that has not healed; None if all have. Pure.

    Args:
        incidents: in time.
        events: of the journal.
        last_step_at: Unix time of the last train step.
    """
    end: Mapping[str, Any] = next((event for event in reversed(events) if event["event"] in _ENDS), {})
    for one in reversed(incidents):
        if one.ends_attempt and one.failed and one.attempt == end.get("attempt"):
            own = [each for each in incidents if each.who == one.failed and each.attempt == one.attempt]
            return own[-1] if own else one
    is_complete = end.get("state") == EndState.COMPLETE
    starts = {name: float(event["time"]) for event in events if (name := _STARTED.get(event["event"], ""))}
    starts |= {str(event.get("worker")): float(event["time"]) for event in events if event["event"] == "worker_started"}

    def has_healed(one: Incident) -> bool:
        again = starts.get(one.who, one.time if one.is_outside else 0.0)
        return is_complete or one.time <= again < last_step_at

    causes = [one for one in incidents if not one.is_consequence and not has_healed(one)]
    if not causes or not causes[-1].is_outside:
        return causes[-1] if causes else None
    last = causes[-1]
    close = [one for one in causes if one.is_outside and one.node and last.time - one.time <= _SAME_EVENT_S]
    return close[0] if close and close[0].attempt == last.attempt else last


def _without_first_words(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the ends of each attempt the last one alone: the end of a trial tells that of its attempt again."""
    last = {event.get("attempt"): event for event in events if event["event"] in _ENDS}
    return [event for event in events if event["event"] not in _ENDS or event is last[event.get("attempt")]]


def _incident_of_exit(record: Mapping[str, Any]) -> Incident:
    what = str(record.get("how") or exit_text(record["returncode"]))
    if is_out_of_memory(record) and "out of memory" not in what:
        what = f"{what}, out of memory"
    return Incident(
        time=float(record["time"]),
        who=str(record["worker"]),
        what=what,
        attempt=record.get("attempt"),
        node=str(record.get("node") or ""),
        is_consequence=bool(record.get("is_consequence")),
        details=tuple(str(line) for line in list(record.get("last_lines") or ())[-_MAX_DETAILS:]),
    )


def _incident_of_event(event: Mapping[str, Any]) -> Incident | None:
    name, cause, state = event["event"], str(event.get("cause") or ""), str(event.get("state") or "")
    code, who = int(event.get("returncode") or 0), str(event.get("worker") or "redis")
    is_consequence = bool(event.get("is_consequence"))
    make = partial(Incident, time=float(event["time"]), attempt=event.get("attempt"))
    match name:
        case "node_failed":
            return make(who="node", what=cause or "failed", node=str(event.get("node") or ""), is_outside=True)
        case "supervisor_died":
            what = f"{exit_text(code)}; {cause}" if cause else exit_text(code)
            return make(who="supervisor", what=what, is_consequence=is_consequence)
        case "supervisor_failed":
            return make(who="supervisor", what=cause, is_outside=True)
        case "redis_exited":
            return make(who=who, what=str(event.get("how")), is_consequence=is_consequence) if code else None
        case "redis_not_started" | "worker_not_started":
            return make(who=who, what=cause)
        case "attempt_ended" | "trial_ended" if state in _OUTSIDE:
            what = f"{state}: {cause}" if cause else state
            return make(who="attempt", what=what, is_outside=True, ends_attempt=True)
        case "attempt_ended" | "trial_ended" if state == EndState.FAILED:
            failed = str(event.get("failed") or "trial")
            is_of_supervisor = failed == "supervisor"
            return make(
                who="trial", what=f"FAILED: {cause}", failed=failed, is_outside=is_of_supervisor, ends_attempt=True
            )
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
