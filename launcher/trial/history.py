"""What the journal of a trial says about its last attempt and about those before it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from corral.launcher.trial.exits import exit_text


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
class JournalView:
    """The journal, seen from one attempt."""

    events: Sequence[Event]
    attempt: int

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
            before = lives.get(str(event.get("worker")))
            if before is not None and event["event"] == "worker_started":
                lives[event["worker"]] = WorkerLife(
                    pid=event.get("pid"),
                    node=str(event.get("node") or ""),
                    incarnation=str(event.get("incarnation") or ""),
                    started_at=float(event["time"]),
                    restarts=before.restarts + (before.started_at is not None),
                    last_end=before.last_end,
                    failure=before.failure,
                )
            elif before is not None and before.started_at is not None and event["event"] == "worker_exited":
                code, ended_at = int(event["returncode"]), float(event["time"])
                last_end = str(event.get("how") or exit_text(code))
                is_signalled = code < 0 and event.get("is_consequence")
                failure = before.failure if is_signalled else last_end if code else ""
                ended = replace(before, pid=None, exit=exit_text(code), ended_at=ended_at)
                lives[event["worker"]] = replace(ended, last_end=last_end, failure=failure)
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
        ends = [self._end_of(number) for number in numbers]
        return tuple(end for end in ends if end.attempt < self.attempt or end.ended_at is not None)

    def _end_of(self, number: int) -> PastAttempt:
        events = [event for event in self.events if event.get("attempt") == number]
        ended = next((event for event in reversed(events) if event["event"] in ("trial_ended", "attempt_ended")), None)
        started = next((event for event in events if event["event"] == "supervisor_started"), events[0])
        nodes = (str(event.get("node")) for event in events if event["event"] == "node_failed")
        return PastAttempt(
            attempt=number,
            state=str(ended.get("state")) if ended else "",
            cause=str(ended.get("cause") or "") if ended else "",
            nodes=tuple(dict.fromkeys(nodes)),
            started_at=float(started["time"]),
            ended_at=float(ended["time"]) if ended else None,
        )
