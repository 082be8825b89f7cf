"""From what a user types to a trial directory, and the contents of its files, for all commands that read trials.

a name, experiment/trial, or a path --find_trial--> plan.json --> TrialFacts, without the schema
                                                              --read_plan--> RunPlan
control/attempt-N.json, claim-N.json --+
control/end-N.json --------------------+--> TrialView: how its workers, its last attempt and those before it stand
events.jsonl --------------------------+
ledger/ --dropped_prompts--> prompts that were dropped, with the reasons

{fileroot}/{experiment}/{trial}/plan.json      fileroot is --fileroot, else $CORRAL_FILEROOT, else ~/corral
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from corral.experiments.errors import ConfigError, did_you_mean
from corral.experiments.exit_codes import CommandExit, UserError
from corral.experiments.trial.attempts import AttemptEnd, AttemptRecord, last_attempt, read_claim, read_ends
from corral.experiments.trial.directory import TrialDirectory, list_names, validate_name
from corral.experiments.trial.journal import read_journal
from corral.launcher.trial.ends import TASK_ENDED, End, ends_of, exit_text
from corral.scheduling.worker_information import planned_workers

if TYPE_CHECKING:
    from corral.experiments.plan import RunPlan

_NODE_LOCAL = tuple(Path(folder) for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run"))


class TrialNotFoundError(UserError):
    """No trial is meant by that, or more than one."""

    exit_code = CommandExit.NOT_FOUND


class PlanDamagedError(UserError):
    """The trial is there, and its plan cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFacts:
    """The facts of a trial in plan.json, read without the schema: rl-status shows many trials in no time."""

    directory: TrialDirectory
    experiment: str
    trial: str
    uuid: str
    mode: str
    total_steps: int | None
    workers: tuple[str, ...]
    setup_timeout_s: float
    stop_grace_s: float
    healthy_after_s: float
    planned_path: Path | None = None
    """Where its folder was when it was submitted, and where its workers look for it."""
    trackers: tuple[str, ...] = ()
    """The trackers of its numbers, which the supervisor calls tracker/0, tracker/1, ..."""

    @property
    def name(self) -> str:
        """experiment/trial."""
        return f"{self.experiment}/{self.trial}"

    @property
    def tasks(self) -> list[str]:
        """Workers, and trackers as the supervisor calls them."""
        return [*self.workers, *(f"tracker/{index}" for index in range(len(self.trackers)))]


def default_fileroot() -> Path:
    """Where trials are, unless an experiment or --fileroot says otherwise."""
    configured = os.environ.get("CORRAL_FILEROOT")
    return Path(os.path.expanduser(configured)) if configured else Path.home() / "corral"


def node_local_folder(directory: Path) -> Path | None:
    """The folder above this one that every node usually has for itself; None if there is none."""
    real = Path(os.path.realpath(directory))
    return next((folder for folder in _NODE_LOCAL if real.is_relative_to(folder)), None)


def find_trial(argument: str, fileroot: Path) -> TrialFacts:
    """The one trial that is meant.

    Raises:
        TrialNotFoundError: with the candidates.
        PlanDamagedError: if it is there, and its plan cannot be read.
    """
    as_path = Path(os.path.expanduser(argument))
    if as_path.is_absolute() or argument.startswith((".", "~")) or (as_path / "plan.json").is_file():
        facts = load_facts(TrialDirectory(Path(os.path.realpath(as_path))))
        if facts is None:
            raise TrialNotFoundError(f"{as_path} is no trial directory: it has no plan.json")
        return facts
    # Names are folder names, so the trial is found without reading the others.
    exact = [facts for path in _paths_of(argument, fileroot) if (facts := load_facts(TrialDirectory(path)))]
    if len(exact) == 1:
        return exact[0]
    if exact:
        names = ", ".join(one.name for one in exact)
        raise TrialNotFoundError(f"{argument!r} is the name of {len(exact)} trials: {names}; write experiment/trial")
    there = [plan.parent for plan in fileroot.glob("*/*/plan.json")]
    known = [f"{path.parent.name}/{path.name}" for path in there] + [path.name for path in there]
    hint = did_you_mean(argument, known, f"rl-status lists those that are there ({len(there)})")
    raise TrialNotFoundError(f"no trial {argument!r} below {fileroot}; {hint}")


def _paths_of(argument: str, fileroot: Path) -> list[Path]:
    try:
        parts = [validate_name(part) for part in argument.split("/")]
    except ValueError:
        return []
    if len(parts) == 1:
        folders = (fileroot / experiment / argument for experiment in list_names(fileroot))
        return [path for path in folders if path.is_dir()]
    return [fileroot / argument] if len(parts) == 2 else []


def read_plan(directory: TrialDirectory) -> "RunPlan":
    """The plan of a trial.

    Raises:
        ConfigError: if it cannot be read, as that of another version.
    """
    from corral.experiments.plan import RunPlan  # not at the top: rl-status answers without the schema

    try:
        return RunPlan.from_json(directory.plan_path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError.of(f"the plan of {directory.path} cannot be read: {error}") from error


def read_facts(directory: TrialDirectory) -> TrialFacts | None:
    """The facts of the plan, or None if there is no plan (yet), or none that can be read."""
    try:
        return load_facts(directory)
    except (PlanDamagedError, PermissionError):
        return None


def load_facts(directory: TrialDirectory) -> TrialFacts | None:
    """The facts of the plan, or None if there is no plan (yet).

    Raises:
        PlanDamagedError: if there is one, and it is not what rl-submit writes.
        PermissionError: if it is somebody else's.
    """
    try:
        data = directory.plan_path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        plan = msgspec.json.decode(data)
        return TrialFacts(
            directory=directory,
            experiment=plan["trial"]["experiment"],
            trial=plan["trial"]["trial"],
            uuid=plan["trial"]["uuid"],
            mode=plan["mode"],
            total_steps=next((worker["total_steps"] for worker in plan["workers"] if "total_steps" in worker), None),
            workers=tuple(planned_workers(plan["workers"])),
            setup_timeout_s=float(plan["supervision"]["setup_timeout_s"]),
            stop_grace_s=float(plan["supervision"]["stop_grace_s"]),
            healthy_after_s=float(plan["supervision"]["healthy_after_s"]),
            planned_path=Path(plan["trial"]["directory"]),
            trackers=tuple(plan.get("tracking", {}).get("to", ())),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise PlanDamagedError(
            f"{directory.plan_path} is damaged ({error}): put the file back from a backup. Without one, end what still "
            f"runs of the trial with scancel or kill, and submit {directory.config_path} as a new trial; its model may "
            f"be the weights of a checkpoint in {directory.checkpoints_path}"
        ) from error


_SUBMISSIONS = ("submitted", "successor_submitted", "extra_job_submitted")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLife:
    """The life of one worker in the last attempt, by the journal."""

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
        """The time of the trial's last record (Unix time)."""
        return max([self.submitted_at, *(float(event["time"]) for event in self.events[-1:])])

    def named(self, name: str) -> list[Event]:
        """The events of this name, of all attempts."""
        return [event for event in self.events if event["event"] == name]

    @property
    def job_by_attempt(self) -> dict[int, str]:
        """The job that each attempt was submitted as, or that began it."""
        of_jobs = [event for event in self.named("submitted") if event.get("job_id")]
        return {event["attempt"]: str(event["job_id"]) for event in of_jobs if isinstance(event.get("attempt"), int)}

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


MAX_COMMITS = 1000
"""That are looked at, the last ones."""


def dropped_prompts(directory: TrialDirectory) -> tuple[dict[str, str], bool]:
    """The reason by uid, of all attempts, the earliest first; and whether these are of the last commits only."""
    deltas = sorted((path for path in directory.ledger_path.glob("*-*-*.json")), key=_epoch_and_step)
    reasons = dict[str, str]()  # those of a commit that was taken back come again
    for path in deltas[-MAX_COMMITS:]:
        with suppress(OSError, ValueError):  # code that needs the ledger reports the error
            reasons |= json.loads(path.read_bytes())["dropped"]
    return reasons, len(deltas) > MAX_COMMITS


def _epoch_and_step(delta: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in delta.name.split("-")[:2])


def chosen_steps(wanted: str, there: Collection[int], *, option: str, limit: str) -> list[int]:
    """Those of some steps that `latest`, `all`, a number or a span such as 40:50, its end included, mean.

    Args:
        there: at least one.
        limit: the setting that says for how long steps are kept.

    Raises:
        ConfigError: if none of them is there.
    """
    first, last = min(there), max(there)
    begin, colon, end = {"latest": f"{last}", "all": ":"}.get(wanted, wanted).partition(":")
    if not all(part.isdecimal() for part in (begin, end) if part):
        hint = "a number, a span such as 40:50, latest, or all"
        raise ConfigError.of(f"{option} {wanted!r} is no train step", hint=hint)
    low = int(begin) if begin else first
    high = int(end) if end else last if colon else low
    if not (found := sorted(step for step in there if low <= step <= high)):
        hint = f"there are {len(there)} steps from {first} to {last}; {limit} says for how long"
        raise ConfigError.of(f"nothing of step {wanted} is kept", hint=hint)
    return found
