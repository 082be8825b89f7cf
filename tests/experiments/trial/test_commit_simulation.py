"""Many masters at once over one trial log, in every order that a seed can think of.

Each master is the real `TrialLog` and `LogWriter` in a thread of its own; storage hands control back before and after
each step, and a seeded scheduler decides who takes the next one, who freezes for long, who dies, whose reply is lost,
who sees an old end of the log, and whether the newest checkpoint is damaged, so that the next master falls back. One
seed is one schedule, always the same. Snapshots of the log are frequent, and some say what never came true.

Mutants at the end break one rule each and must be noticed, or the simulation proves nothing.
"""

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from corral.experiments.trial import log as trial_logs
from corral.experiments.trial.log import LogWriter, TrialLog
from corral.experiments.trial.log_state import (
    Commit,
    CorruptLogError,
    DoneError,
    Entry,
    LoggedCommit,
    LogState,
    StoppedError,
    SupersededError,
    UncertainAppendError,
)

_NUM_SAMPLES = 12
_BATCH = 2
_COMMIT_EVERY = 2
_STEP_TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def _frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_logs, "_SLOTS_BETWEEN_SNAPSHOTS", 2)


class Violation(Exception):
    """What must never happen has happened."""


class Killed(BaseException):
    """This simulated process is dead; no handler of the code under test may catch it."""


class Process:
    """One simulated process: runs only while the scheduler waits for it."""

    def __init__(self, name: str, body: Callable[["Process"], None]) -> None:
        self.name = name
        self.alive = True
        self.doomed = False
        self.frozen_for = 0
        self.error: BaseException | None = None
        self._mine = threading.Lock()
        self._scheduler = threading.Lock()
        self._mine.acquire()
        self._scheduler.acquire()
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Called by the process: gives control away; dies here if it was killed meanwhile."""
        self._scheduler.release()
        _acquire(self._mine, self.name)
        if self.doomed:
            raise Killed

    def step(self) -> None:
        """Called by the scheduler: lets the process run up to its next pause."""
        self._mine.release()
        _acquire(self._scheduler, self.name)

    def _run(self, body: Callable[["Process"], None]) -> None:
        _acquire(self._mine, self.name)
        try:
            if not self.doomed:
                body(self)
        except Killed:
            self.doomed = True
        except BaseException as error:
            self.error = error
        self.alive = False
        self._scheduler.release()


def _acquire(lock: threading.Lock, name: str) -> None:
    if not lock.acquire(timeout=_STEP_TIMEOUT_S):
        raise TimeoutError(f"simulated process {name} did not take its step within {_STEP_TIMEOUT_S:.0f} s")


@dataclass
class World:
    """The shared file system, and what must be true of it."""

    random: random.Random
    mutants: frozenset[str]
    slots: dict[int, bytes] = field(default_factory=dict)
    snapshot: bytes = b""
    num_used_snapshots: int = 0
    shards: dict[tuple[str, int], tuple[str, frozenset[int]]] = field(default_factory=dict)
    ledgers: dict[str, frozenset[int]] = field(default_factory=dict)
    spool: set[int] = field(default_factory=lambda: set(range(_NUM_SAMPLES)))
    damaged: set[str] = field(default_factory=set)
    """Directories of commits that no master can load any more."""
    acknowledged: list[LoggedCommit] = field(default_factory=list)
    faults: bool = True

    def chance(self, probability: float) -> bool:
        return self.faults and self.random.random() < probability


class SimulatedStorage:
    """Slots of the world as one process sees them."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def read(self, slot: int) -> bytes | None:
        self._process.pause()
        if self._world.chance(0.2):
            return None  # an attribute cache that has not noticed the newest slots yet
        return self._world.slots.get(slot)

    def put_if_absent(self, slot: int, data: bytes) -> bytes | None:
        world = self._world
        self._process.pause()
        if world.chance(0.01):
            raise UncertainAppendError("the request was lost")
        occupant = None if "overwrite_slot" in world.mutants else world.slots.get(slot)
        if occupant is None:
            world.slots[slot] = data
        self._process.pause()  # a crash here: done, but nobody was told
        if occupant is None and world.chance(0.1):
            return data  # the reply was lost, and the retry finds its own entry
        if world.chance(0.01):
            raise UncertainAppendError("the reply was lost for good")
        return occupant

    def read_snapshot(self) -> bytes:
        self._process.pause()
        return b"" if self._world.chance(0.2) else self._world.snapshot

    def write_snapshot(self, data: bytes) -> None:
        self._process.pause()
        self._world.snapshot = data

    def highest_slot(self) -> int:
        self._process.pause()
        return max(self._world.slots, default=0)

    def remove_leftovers(self, below_slot: int) -> None:
        self._process.pause()


class SimulatedLog(TrialLog):
    """Now and then writes the snapshot of an entry before the entry, which may then never come."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(Path("log"), storage=SimulatedStorage(world, process))
        self._world = world

    def append(self, make_entry: Callable[[LogState], Entry]) -> int:
        state = self.state
        if self._world.chance(0.2) and state.refusal(entry := make_entry(state)) is None:
            self._state = state.after(entry)
            self.write_snapshot()
            self._state = state
        return super().append(make_entry)

    def _read_snapshot(self) -> LogState:
        data = self._world.snapshot
        if "believe_any_snapshot" in self._world.mutants and data:
            return msgspec.json.decode(data.partition(b"\n")[2], type=LogState)
        state = super()._read_snapshot()
        self._world.num_used_snapshots += state != LogState()
        return state


class CommitAnyway(LogWriter):
    """Mutant: does not care who claimed or stopped."""

    def _append(self, entry: Entry) -> int:
        slot = self.state.next_slot
        self._log._storage.put_if_absent(slot, self._log._encode(entry))
        self._log.read()
        return slot


class AppendAtTail(LogWriter):
    """Mutant: looks for the end of the log and appends there, whatever it passes on the way."""

    def _append(self, entry: Entry) -> int:
        self._log.read()
        return super()._append(msgspec.structs.replace(entry, epoch=self.state.epoch))


def _master(world: World, resume: bool) -> Callable[[Process], None]:
    def body(process: Process) -> None:
        log = SimulatedLog(world, process)
        try:
            writer = log.claim(process.name, resume=resume)
            _fall_back(world, writer)
            _train(world, process, _as_mutant(world, log, writer))
        except (SupersededError, StoppedError, UncertainAppendError):
            return

    return body


def _fall_back(world: World, writer: LogWriter) -> None:
    lineage = writer.state.lineage
    whole = [logged for logged in lineage if logged.commit.directory not in world.damaged]
    if whole and whole[-1] != lineage[-1]:
        writer.fall_back_to(whole[-1].slot, reason="a shard is damaged")


def _issue_again(world: World) -> None:
    """What the rollout workers do: a prompt that only a rejected commit covers is generated once more."""
    state = _read(world).state
    covered = _covered(world, state.lineage)
    if "settled_by_any_commit" in world.mutants:
        covered = _covered(world, _all_commits(world))
    world.spool |= _covered(world, _all_commits(world)) - covered


def _covered(world: World, commits: Iterable[LoggedCommit]) -> frozenset[int]:
    return frozenset[int]().union(*(world.ledgers[logged.commit.ledger_file] for logged in commits))


def _as_mutant(world: World, log: TrialLog, writer: LogWriter) -> LogWriter:
    if "commit_anyway" in world.mutants:
        return CommitAnyway(log)
    if "append_at_tail" in world.mutants:
        return AppendAtTail(log)
    lineage = writer.state.lineage
    if "stale_base" in world.mutants and len(lineage) > 1:
        writer.fall_back_to(lineage[-2].slot, reason="for no reason")
    return writer


def _train(world: World, process: Process, writer: LogWriter) -> None:
    lineage = writer.state.lineage
    consumed = _covered(world, lineage)
    committed, step = consumed, lineage[-1].commit.step if lineage else 0
    while consumed < frozenset(range(_NUM_SAMPLES)):
        _issue_again(world)
        batch = sorted(world.spool - consumed)[:_BATCH]
        if not batch and _read(world).state.epoch > writer.epoch:
            return  # its successor has trained them; it would notice at its next commit
        if not batch:
            raise Violation(f"{process.name} finds no sample in the spool, but has consumed only {sorted(consumed)}")
        consumed |= frozenset(batch)
        step += 1
        if step % _COMMIT_EVERY == 0 or len(consumed) == _NUM_SAMPLES:
            _commit(world, process, writer, step, delta=consumed - committed, weights=consumed)
            committed = consumed
    writer.done()


def _commit(
    world: World, process: Process, writer: LogWriter, step: int, *, delta: frozenset[int], weights: frozenset[int]
) -> None:
    owner = "" if "step_only_directory" in world.mutants else f"-e{writer.epoch}-{process.name}"
    directory, ledger_file = f"step-{step}{owner}", f"{writer.epoch}-{step}-{process.name}"

    def write_log() -> None:
        logged = writer.commit(
            step=step,
            directory=directory,
            manifest_digest=process.name,
            ledger_file=ledger_file,
            ledger_digest="",
            trained=len(delta),
            dropped=0,
        )
        world.acknowledged.append(logged)

    def write_shards() -> None:
        for shard in range(2):
            process.pause()
            world.shards[directory, shard] = (process.name, weights)
        process.pause()
        world.ledgers[ledger_file] = delta

    def clean_spool() -> None:
        process.pause()
        world.spool -= delta

    order = [write_shards, write_log, clean_spool]
    if "commit_first" in world.mutants:
        order = [write_log, write_shards, clean_spool]
    if "clean_before_commit" in world.mutants:
        order = [write_shards, clean_spool, write_log]
    for act in order:
        act()


def _stopper(world: World) -> Callable[[Process], None]:
    def body(process: Process) -> None:
        try:
            SimulatedLog(world, process).request_stop(process.name)
        except (DoneError, UncertainAppendError):
            return

    return body


def _run(seed: int, *mutants: str) -> World:
    world = World(random=random.Random(seed), mutants=frozenset(mutants))
    processes: list[Process] = []

    def start(body: Callable[[Process], None], kind: str) -> None:
        processes.append(Process(f"{kind}{len(processes)}", body))

    def step_one(process: Process) -> None:
        process.step()
        if process.error is not None:
            raise process.error

    def finish_all() -> None:
        for process in processes:
            process.doomed = True
            while process.alive:
                process.step()

    try:
        start(_master(world, resume=False), "master")
        for _ in range(world.random.randrange(60, 200)):
            alive = [process for process in processes if process.alive]
            ready = [process for process in alive if process.frozen_for <= 0]
            for process in alive:
                process.frozen_for -= 1
            if not ready or (len(alive) < 4 and world.chance(0.05)):
                start(_master(world, resume=world.chance(0.5)), "master")
            elif world.chance(0.01):
                start(_stopper(world), "stopper")
            elif world.chance(0.01):
                _damage_newest(world)
            elif world.chance(0.03):
                world.random.choice(ready).doomed = True
            elif world.chance(0.05):
                world.random.choice(ready).frozen_for = world.random.randrange(5, 60)
            else:
                step_one(world.random.choice(ready))
        world.faults = False
        _require_completion(world, processes, start, step_one)
        _require_correct(world)
    finally:
        finish_all()
    return world


def _damage_newest(world: World) -> None:
    """At least two commits are kept, and only one of them is ever damaged."""
    directories = [logged.commit.directory for logged in _read(world).state.lineage[-2:]]
    if len(directories) == 2 and directories[0] not in world.damaged:
        world.damaged.add(directories[1])


def _require_completion(
    world: World,
    processes: list[Process],
    start: Callable[[Callable[[Process], None], str], None],
    step_one: Callable[[Process], None],
) -> None:
    """Faults are over: whoever lives runs on, a master is started whenever none does, and the trial must complete."""
    for _ in range(3000):
        alive = [process for process in processes if process.alive]
        if alive:
            step_one(world.random.choice(alive))
        elif _read(world).state.is_done:
            return
        else:
            start(_master(world, resume=True), "master")
    raise Violation("the trial is not done long after the last fault")


class _PlainStorage:
    """Slots alone decide what is true."""

    def __init__(self, world: World) -> None:
        self._world = world

    def read(self, slot: int) -> bytes | None:
        return self._world.slots.get(slot)

    def put_if_absent(self, slot: int, data: bytes) -> bytes | None:
        raise NotImplementedError

    def read_snapshot(self) -> bytes:
        return b""

    def write_snapshot(self, data: bytes) -> None:
        raise NotImplementedError

    def highest_slot(self) -> int:
        raise NotImplementedError

    def remove_leftovers(self, below_slot: int) -> None:
        raise NotImplementedError


def _read(world: World) -> TrialLog:
    log = TrialLog(Path("log"), storage=_PlainStorage(world))
    log.read()
    return log


def _all_commits(world: World) -> list[LoggedCommit]:
    """Also those that a fallback has left behind."""
    entries = TrialLog(Path("log"), storage=_PlainStorage(world)).poll()
    return [LoggedCommit(slot, entry) for slot, entry in entries if isinstance(entry, Commit)]


def _require_correct(world: World) -> None:
    state = _read(world).state
    commits = state.lineage
    for logged in {*world.acknowledged, *_all_commits(world)}:
        if logged not in commits and logged.commit.directory not in world.damaged:
            raise Violation(f"commit {logged} is whole and is lost")
    trained: set[int] = set()
    previous = 0
    for logged in commits:
        commit: Commit = logged.commit
        if commit.parent != previous:
            raise Violation(f"{logged} continues slot {commit.parent}, but the commit before is slot {previous}")
        previous = logged.slot
        delta = world.ledgers.get(commit.ledger_file)
        if delta is None or delta & trained:
            raise Violation(f"{logged} has no ledger, or trains again what was trained")
        trained |= delta
        for shard in range(2):
            # The manifest digest stands for the writer here: one writer, one content.
            if world.shards.get((commit.directory, shard)) != (commit.manifest_digest, frozenset(trained)):
                raise Violation(f"{logged} names a checkpoint that is torn or mixes two writers")
    if trained != set(range(_NUM_SAMPLES)):
        raise Violation(f"samples {sorted(set(range(_NUM_SAMPLES)) - trained)} were never trained")


@pytest.mark.parametrize("num_schedules", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_schedule_of_crashes_zombies_and_lost_replies_breaks_the_commit_rules(num_schedules: int) -> None:
    masters = stops = lost = fallbacks = used = 0
    for seed in range(num_schedules):
        try:
            world = _run(seed)
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
        masters += _read(world).state.epoch
        stops += sum(b'"kind":"stop"' in data for data in world.slots.values())
        lost += len(_all_commits(world)) - len(world.acknowledged)
        used += world.num_used_snapshots
        fallbacks += sum(b'"kind":"fallback"' in data for data in world.slots.values())
    # The schedules must have been as bad as they are meant to be.
    assert masters > 2 * num_schedules and min(stops, lost, fallbacks) > num_schedules / 25
    assert used > num_schedules


@pytest.mark.parametrize(
    "mutant",
    [
        "overwrite_slot",
        "commit_anyway",
        "append_at_tail",
        "stale_base",
        "commit_first",
        "clean_before_commit",
        "step_only_directory",
        "settled_by_any_commit",
        "believe_any_snapshot",
    ],
)
def test_breaking_one_rule_is_noticed(mutant: str) -> None:
    for seed in range(300):
        try:
            _run(seed, mutant)
        except (Violation, CorruptLogError, KeyError, ValueError):
            return
    pytest.fail(f"300 schedules did not notice the mutant {mutant}")
