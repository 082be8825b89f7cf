"""rl-logs --errors: the first cause, then its consequences, of workers and of what happens around them.

    exits/*.json                  a worker's exit, its last lines --+
    events.jsonl                  a node lost, the supervisor dead, --+--> Incidents in time --first cause--> text
                                  Redis dead, how an attempt ended ---+
    logs/slurm-*.log, supervisor.log   SLURM's own words ------------+

    ledger/*.json                 prompts that were dropped, with the reason: of an agent or a reward, its file and line

A worker on a node that failed, or in an attempt that SLURM ended, died of that, though its exit was seen first.
"""

import re
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import read_journal
from corral.experiments.trial.log_state import DROPPED_AS_FILTERED
from corral.launcher.terminal import format_moment, printable
from corral.launcher.trial.dropped import MAX_COMMITS, dropped_prompts
from corral.launcher.trial.exits import is_consequence, is_out_of_memory, read_exits, tail_lines
from corral.launcher.trial.history import JournalView

_MAX_FOLLOWED = 20
_MAX_DETAILS = 20
_MAX_UIDS = 5  # of prompts that were dropped for one reason
_OUTSIDE = ("NODE_FAILED", "PREEMPTED", "TIMED_OUT", "CANCELLED", "OOM")
_ENDS = ("attempt_ended", "trial_ended")
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
    details: tuple[str, ...] = ()


def describe_failures(directory: TrialDirectory, *, attempt: int | None) -> str:
    """The first cause of an attempt, or of all, with what was said before it, and what followed."""
    events = read_journal(directory.journal_path)
    incidents = [one for one in find_incidents(read_exits(directory), events) if attempt in (None, one.attempt)]
    dropped = list(_dropped(directory))
    if incidents:
        lines = _describe(incidents, directory)
    else:
        nothing = "no worker has failed" if dropped else "nothing has failed"
        lines = [nothing + ("" if attempt is None else f" in attempt {attempt}"), *_slurm_says(directory)]
    return "\n".join(printable(line) for line in [*lines, *_alarms(events, attempt), *dropped])


def _describe(incidents: Sequence[Incident], directory: TrialDirectory) -> list[str]:
    first = find_first_cause(incidents)
    where = f" on {first.node}" if first.node else ""
    of_attempt = "?" if first.attempt is None else str(first.attempt)
    lines = [f"first failure: {first.who}{where}, {first.what}, {format_moment(first.time)}, attempt {of_attempt}"]
    lines += [f"  {line}" for line in first.details]
    if first.is_outside:
        lines += _slurm_says(directory)
    followed = [one for one in incidents if one is not first]
    if followed:
        lines.append("then:")
        lines += [f"  {one.who} {one.what} {one.time - first.time:+.1f}s" for one in followed[:_MAX_FOLLOWED]]
    if len(followed) > _MAX_FOLLOWED:
        lines.append(f"  ... and {len(followed) - _MAX_FOLLOWED} more")
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


def find_first_cause(incidents: Sequence[Incident]) -> Incident:
    """The one that explains the others. Pure."""
    causes = [one for one in incidents if not one.is_consequence] or list(incidents)
    first = causes[0]
    if first.is_outside:
        return first
    for one in incidents:
        is_close = 0.0 <= one.time - first.time <= _SAME_EVENT_S and one.attempt == first.attempt
        if one.is_outside and is_close and one.node in ("", first.node):
            return one
    return first


def _without_first_words(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the ends of each attempt the last one alone: the end of a trial tells that of its attempt again."""
    last = {event.get("attempt"): event for event in events if event["event"] in _ENDS}
    return [event for event in events if event["event"] not in _ENDS or event is last[event.get("attempt")]]


def _incident_of_exit(record: Mapping[str, Any]) -> Incident:
    what = str(record.get("signal") or f"exit {record['returncode']}")
    if is_out_of_memory(record):
        what = f"{what}, out of memory"
    return Incident(
        time=float(record["time"]),
        who=str(record["worker"]),
        what=what,
        attempt=record.get("attempt"),
        node=str(record.get("node") or ""),
        is_consequence=is_consequence(record),
        details=tuple(str(line) for line in list(record.get("last_lines") or ())[-_MAX_DETAILS:]),
    )


def _incident_of_event(event: Mapping[str, Any]) -> Incident | None:
    name, cause, state = event["event"], str(event.get("cause") or ""), str(event.get("state") or "")
    code, who = int(event.get("returncode") or 0), str(event.get("worker") or "redis")
    make = partial(Incident, time=float(event["time"]), attempt=event.get("attempt"))
    match name:
        case "node_failed":
            return make(who="node", what=cause or "failed", node=str(event.get("node") or ""), is_outside=True)
        case "supervisor_died":
            return make(
                who="supervisor", what=f"ended by signal {-code}" if code < 0 else f"exit {code}", is_outside=True
            )
        case "supervisor_failed":
            return make(who="supervisor", what=cause, is_outside=True)
        case "redis_exited" if event.get("returncode") in (0, -signal.SIGKILL, -signal.SIGTERM):
            return None  # at the end Redis is ended by us, which is no failure
        case "redis_exited" | "redis_not_started" | "worker_not_started":
            return make(who=who, what=cause or f"ended with {event.get('returncode')}")
        case "attempt_ended" | "trial_ended" if state in _OUTSIDE or event.get("failed") == "supervisor":
            return make(who="attempt", what=f"{state}: {cause}" if cause else state, is_outside=True)
        case "trial_ended" if state == "FAILED":
            return make(who="trial", what=f"FAILED: {cause}", is_consequence=True)
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
