"""What the files of a trial say of its attempts: opened once, and read by rl-status, rl-logs and rl-stop.

control/attempt-N.json, claim-N.json --+
control/end-N.json --------------------+--> TrialView: how its workers, its last attempt and those before it stand
events.jsonl --------------------------+
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from corral.experiments.trial.attempts import AttemptEnd, AttemptRecord, last_attempt, read_claim, read_ends
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import read_journal
from corral.launcher.trial.ends import TASK_ENDED, End, ends_of, exit_text

_SUBMISSIONS = ("submitted", "successor_submitted", "extra_job_submitted")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLife:
    """What the journal knows about one worker in the last attempt."""

    pid: int | None = None
    node: str = ""
    incarnation: str = ""
    started_at: float | None = None
    restarts: int = 0
    exit: str = ""
    """How its last process ended, while no newer one was started."""
    last_end: str = ""
    """How the process before ended, or the last one did, with the cause."""
    failure: str = ""
    """How the last process failed; "" if it has ended in order. A signal of the supervisor's is no failure."""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """One attempt that is over, for the history."""

    attempt: int
    state: str
    cause: str
    nodes: tuple[str, ...]
    """Nodes that failed."""
    started_at: float
    ended_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a train step has found out."""

    topic: str = ""
    """What it is about, the same whenever it is found."""
    is_alarm: bool = False
    """Whether it is wrong; training goes on with it."""
    text: str
    details: str = ""
    causes: tuple[str, ...] = ()
    """Likeliest first."""
    step: int
    """The train step that found it."""


Event = Mapping[str, Any]


@dataclass(frozen=True)
class TrialView:
    """The files of a trial at one moment, seen from one of its attempts."""

    events: Sequence[Event]
    """Of the journal, the oldest first."""
    attempt: int = 0
    record: AttemptRecord | None = None
    """Of that attempt; None before the first."""
    job_id: str = ""
    """The job that runs the attempt, or is to run it; "" if there is none."""
    ends: Mapping[int, AttemptEnd] = field(default_factory=dict)
    """How attempts ended, by their numbers."""

    @classmethod
    def open(cls, directory: TrialDirectory) -> "TrialView":
        """The view from the last attempt."""
        record, events = last_attempt(directory), read_journal(directory.journal_path)
        view = cls(events, record.attempt if record else 0, record, ends=read_ends(directory))
        claim, submitted = read_claim(directory, view.attempt), view.last("submitted")
        if claim is not None and claim.job_id.isdecimal():
            return replace(view, job_id=claim.job_id)
        return replace(view, job_id=str(submitted.get("job_id", "")) if submitted else "")

    @property
    def end(self) -> AttemptEnd | None:
        """How the attempt ended; None while it goes on."""
        return self.ends.get(self.attempt)

    @property
    def submitted_at(self) -> float:
        """When the last job was submitted (Unix time): what the cluster said before does not count."""
        submissions = [float(event["time"]) for event in self.events if event["event"] in _SUBMISSIONS]
        return max([*submissions[-1:], self.record.submitted_at if self.record else 0.0])

    @property
    def last_sign_at(self) -> float:
        """When the trial last did something that it told (Unix time)."""
        return max([self.submitted_at, *(float(event["time"]) for event in self.events[-1:])])

    @cached_property
    def task_ends(self) -> list[End]:
        """How tasks of all attempts ended."""
        return ends_of(self.events)

    def failure(self) -> End | None:
        """The end of a task that ended the attempt: of the task that its record names, or the last that nothing else
        explains."""
        caused_by = self.end.caused_by if self.end else ""
        failed = [end for end in self.task_ends if end.attempt == self.attempt and end.code]
        chosen = [end for end in failed if end.who == caused_by] or [end for end in failed if not end.caused_by]
        return chosen[-1] if chosen else None

    def failed_start(self) -> str:
        """Why Redis or the supervisor ended before Redis could run, where each is started again; "" if none did."""
        for event in reversed(self.of_attempt):
            if event["event"] == "supervisor_failed":
                return f"supervisor failed, {event.get('cause')}; it is started again"
            if event["event"] == TASK_ENDED and event.get("who") in ("redis", "supervisor") and not event["caused_by"]:
                return f"{event['who']} {event['why']}; it is started again"
        return ""

    @cached_property
    def of_attempt(self) -> list[Event]:
        """Events of the attempt; those without a number belong to the last one."""
        return [event for event in self.events if event.get("attempt", self.attempt) == self.attempt]

    def last(self, name: str) -> Event | None:
        """The attempt's newest event of this name."""
        return next((event for event in reversed(self.of_attempt) if event["event"] == name), None)

    def lives(self, workers: Sequence[str]) -> dict[str, WorkerLife]:
        """What became of each worker in the attempt."""
        lives = dict.fromkeys(workers, WorkerLife())
        for event in self.of_attempt:
            who = str(event.get("who") or event.get("worker"))
            before = lives.get(who)
            if before is not None and event["event"] == "worker_started":
                lives[who] = WorkerLife(
                    pid=event.get("pid"),
                    node=str(event.get("node") or ""),
                    incarnation=str(event.get("incarnation") or ""),
                    started_at=float(event["time"]),
                    restarts=before.restarts + (before.started_at is not None),
                    last_end=before.last_end,
                    failure=before.failure,
                )
            elif before is not None and before.started_at is not None and event["event"] == TASK_ENDED:
                (end,) = ends_of([event])
                is_signalled = end.code < 0 and end.caused_by
                failure = before.failure if is_signalled else end.why if end.code else ""
                ended = replace(before, pid=None, exit=exit_text(end.code), ended_at=end.time)
                lives[who] = replace(ended, last_end=end.why, failure=failure)
        return lives

    def given_up(self, workers: Sequence[str]) -> dict[str, str]:
        """Workers that the attempt goes on without, and why."""
        given_up = [event for event in self.of_attempt if event["event"] == "unit_given_up"]
        causes = {str(event.get("unit")): str(event.get("cause") or "out of restarts") for event in given_up}
        return {worker: causes[worker] for worker in workers if worker in causes}

    def findings(self) -> tuple[Finding, ...]:
        """The newest of each topic that the attempt's train steps have found out."""
        newest = {event["topic"]: event for event in self.of_attempt if event["event"] == "train_notice"}
        return tuple(msgspec.convert(event, Finding) for event in newest.values())

    def history(self) -> tuple[PastAttempt, ...]:
        """Every attempt that is over, the oldest first."""
        numbers = sorted({int(event["attempt"]) for event in self.events if isinstance(event.get("attempt"), int)})
        return tuple(self._past(number) for number in numbers if number < self.attempt or number in self.ends)

    def _past(self, number: int) -> PastAttempt:
        events = [event for event in self.events if event.get("attempt") == number]
        started = next((event for event in events if event["event"] == "supervisor_started"), events[0])
        nodes = (str(event.get("node")) for event in events if event["event"] == "node_failed")
        end = self.ends.get(number)
        return PastAttempt(
            attempt=number,
            state=end.state if end else "",
            cause=end.cause if end else "",
            nodes=tuple(dict.fromkeys(nodes)),
            started_at=float(started["time"]),
            ended_at=end.ended_at if end else None,
        )
