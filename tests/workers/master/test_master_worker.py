"""How the master ends, and what it does while it looks for the commit to continue."""

import asyncio
import errno
import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Self, cast

import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import CorruptLogError
from corral.experiments.trial.secrets import TrialSecrets
from corral.workers.checkpoint import manifest
from corral.workers.checkpoint.checkpoint import NoValidCheckpointError, RecoveryPoint
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.ledger import LEDGER_NAME
from corral.workers.lifecycle.worker import CannotContinueError, Worker, run_to_exit_code
from corral.workers.master import master_worker
from corral.workers.master.master_worker import MasterWorker, rare_collections
from corral.workers.master.trainer_group import TrainerGroup, TrainerGroupLostError
from corral.workers.streams.errors import StaleEpochError
from tests.workers.master.trials import Begin, KilledError, Trainers


class Presence:
    """Counts beats."""

    def __init__(self) -> None:
        self.beats = 0
        self.deadlines: list[float | None] = []

    def during(self, phase: str, *, deadline_s: float | None = None, **more: object) -> "Presence":
        self.deadlines.append(deadline_s)
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def beat(self) -> None:
        self.beats += 1


@pytest.fixture
def master(tmp_path: Path) -> MasterWorker:
    """A master without streams: its trial, its log, and the settings that it reads here."""
    trial = TrialDirectory(tmp_path / "trial")
    trial.create()
    worker = object.__new__(MasterWorker)
    supervision = SimpleNamespace(max_restarts=3, setup_timeout_s=7.0, step_timeout_s=11.0)
    worker.context = cast(
        Any,
        SimpleNamespace(
            worker_id="master_worker/0",
            secrets=TrialSecrets.create(trial.path / "secrets"),
            trial=trial,
            attempt=0,
            plan=SimpleNamespace(supervision=supervision, seed=1),
            presence=Presence(),
            stopping=threading.Event(),
        ),
    )
    worker._log = TrialLog(trial.log_path)
    worker._journal = Journal(trial.journal_path)
    worker._owner = "host:1"
    worker._spec = cast(Any, SimpleNamespace(num_model_workers=1))
    worker._graph = cast(Any, None)
    return worker


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (StaleEpochError(peer="model_worker/0", epoch=1, max_epoch=2), WorkerExit.SUPERSEDED),
        (NoValidCheckpointError("none of the 2 newest commits can be loaded"), WorkerExit.CANNOT_CONTINUE),
        (CorruptLogError("slot 2 is missing"), WorkerExit.CANNOT_CONTINUE),
        (OSError("stale file handle"), WorkerExit.ERROR),
        (OSError(errno.EIO, "an error of the disk"), WorkerExit.ERROR),
        (OSError(errno.ENOSPC, "no space left"), WorkerExit.NO_ROOM),
        (ExceptionGroup("tasks", [ValueError("other"), OSError(errno.EDQUOT, "over quota")]), WorkerExit.NO_ROOM),
        (raised_from(RuntimeError("weights"), OSError(errno.ENOSPC, "no space left")), WorkerExit.NO_ROOM),
    ],
)
def test_the_exit_code_says_whether_a_restart_would_help(
    master: MasterWorker, monkeypatch: pytest.MonkeyPatch, error: Exception, exit_code: int
) -> None:
    async def fail() -> None:
        raise error

    monkeypatch.setattr(master, "_main", fail)
    assert run_to_exit_code(lambda _: master, master.context) == exit_code


def test_a_damaged_log_that_one_of_several_tasks_meets_is_not_tried_again(master: MasterWorker) -> None:
    class Follower(Worker):
        def run(self) -> NoReturn:
            raise ExceptionGroup("tasks", [ExceptionGroup("inner", [CorruptLogError("slot 2 is no entry")])])

    assert run_to_exit_code(Follower, master.context) == WorkerExit.CANNOT_CONTINUE


class UnreachableTrainers:
    """Model workers that live, so nobody counts their deaths, and never answer."""

    def __init__(self, *arguments: object, epoch: int) -> None:
        assert epoch < 100, "epochs without a commit follow each other for ever"

    async def __aenter__(self) -> NoReturn:
        raise TrainerGroupLostError("model_worker/0 did not connect")

    async def __aexit__(self, *error: object) -> None: ...


def test_epochs_that_end_without_a_commit_are_counted(master: MasterWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_worker, "TrainerGroup", UnreachableTrainers)
    monkeypatch.setattr(master_worker, "may_resume", lambda *arguments: False)
    with pytest.raises(CannotContinueError, match=r"^4 epochs in a row .*max_restarts = 3; .*model_worker/0 did not"):
        asyncio.run(master._main())
    assert TrialLog(master.context.trial.log_path).read().epoch == 4


def test_a_commit_gives_the_epochs_their_whole_budget_back(
    master: MasterWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trainers(UnreachableTrainers):
        async def __aenter__(self) -> Any:
            return None

    async def run_epoch(writer: Any, trainers: Any) -> NoReturn:
        if writer.epoch == 3:
            texts = dict.fromkeys(["directory", "manifest_digest", "ledger_file", "ledger_digest"], "x")
            writer.commit(step=1, trained=0, dropped=0, **texts)
        raise TrainerGroupLostError("model_worker/0 died")

    monkeypatch.setattr(master_worker, "TrainerGroup", Trainers)
    monkeypatch.setattr(master_worker, "may_resume", lambda *arguments: False)
    monkeypatch.setattr(master, "_run_epoch", run_epoch)
    with pytest.raises(CannotContinueError, match="^4 epochs in a row"):
        asyncio.run(master._main())
    assert TrialLog(master.context.trial.log_path).read().epoch == 6


def test_each_piece_of_a_checkpoint_that_is_verified_is_progress(
    master: MasterWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(state: object, trial: object, *, on_progress: Callable[[], None]) -> RecoveryPoint:
        for _ in range(5):
            on_progress()
        return RecoveryPoint()

    monkeypatch.setattr(master_worker, "last_valid_commit", verify)
    asyncio.run(master._recover(master._log.claim("host:1")))
    presence = cast(Any, master.context.presence)
    assert (presence.beats, presence.deadlines) == (5, [7.0])


class ListeningTrainers(Trainers):
    """Knows the event loop that its requests and heartbeats go through."""

    loop: asyncio.AbstractEventLoop

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        return self


def test_the_master_answers_while_a_commit_is_verified(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, run = begin("control.commit_every=1 step")

    def die_after_a_commit(name: str) -> None:
        if name == "train_step" and TrialLog(trial.log_path).read().lineage:
            raise KilledError(name)

    with pytest.raises(KilledError):
        run(Trainers(at_call=die_after_a_commit))
    *_, committed = (logged.commit for logged in TrialLog(trial.log_path).read().lineage)

    trainers, read, real = ListeningTrainers(), set[str](), manifest.read_pieces

    def read_once_answered(path: Path, expected: FileEntry) -> Iterator[memoryview]:
        answered = threading.Event()
        trainers.loop.call_soon_threadsafe(answered.set)
        assert answered.wait(30.0), f"the event loop waits for the hash of {path}"
        read.add(os.path.relpath(path, trial.path))
        return real(path, expected)

    monkeypatch.setattr(manifest, "read_pieces", read_once_answered)
    assert run(trainers) == WorkerExit.DONE
    verified = {name for name in read if name.startswith(f"{committed.directory}/")}
    assert f"{committed.directory}/{LEDGER_NAME}" in verified


def test_loading_a_model_takes_as_long_as_its_ranks_make_progress(
    master: MasterWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float] = []

    async def note(requests: object, *, deadline_s: float) -> dict[str, Any]:
        deadlines.append(deadline_s)
        return {}

    trainers = TrainerGroup(master.context, master._spec, epoch=1)
    monkeypatch.setattr(trainers, "start", note)
    asyncio.run(trainers.initialize(step=0, weights={"actor": Path("weights")}, states={}))
    assert deadlines == [math.inf]


# --- garbage --------------------------------------------------------------------------------------------------------


class Cycle:
    """Refers to itself: only the collector can free it."""

    def __init__(self) -> None:
        self.me = self


def test_what_is_here_is_left_alone_and_what_comes_is_collected_later() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_freeze_count() > 0
        gone = weakref.ref(Cycle())
        kept = [[number] for number in range(2 * before[0])]
        assert gone() is not None and len(kept) == 2 * before[0]  # usually it would be gone by now
        kept += [[number] for number in range(2 * gc.get_threshold()[0])]
        assert gone() is None
    assert gc.get_threshold() == before and gc.get_freeze_count() > 0
