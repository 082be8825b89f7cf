"""Commits that are written while the next steps are trained, with a real trial directory and log."""

import asyncio
import errno
from typing import Any

import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.directory import StopRequest
from corral.experiments.trial.journal import read_journal
from corral.experiments.trial.log import TrialLog
from corral.workers.lifecycle.presence import Presence
from corral.workers.master.disk import LogWatch
from tests.workers.master.trials import NUM_STEPS, Begin, KilledError, Trainers, lines_of, step_by_uid


class SlowDisk:
    """Ranks whose writes end when they are told to."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.num_writing = 0
        self.most_writing = 0

    async def __call__(self) -> None:
        self.num_writing += 1
        self.most_writing = max(self.most_writing, self.num_writing)
        async with asyncio.timeout(60):
            await self.may_end.wait()
        self.num_writing -= 1


def test_steps_are_trained_while_a_commit_is_written_and_it_covers_none_of_them(begin: Begin) -> None:
    trial, run = begin("control.commit_every=2 steps")
    disk = SlowDisk()
    seen: list[tuple[int, int]] = []

    def look(name: str) -> None:
        if name == "train_step" and disk.num_writing:
            seen.append((len(trainers.trained), len(TrialLog(trial.log_path).read().lineage)))
        if name == "train_step" and len(trainers.trained) == 3:  # the fourth step begins
            disk.may_end.set()

    trainers = Trainers(at_call=look, until_written=disk)
    assert run(trainers) == WorkerExit.DONE
    assert (2, 0) in seen and (3, 0) in seen  # the third step, and the fourth, before the commit of the second
    commits = [logged.commit for logged in TrialLog(trial.log_path).read().lineage]
    assert [(commit.step, commit.trained) for commit in commits] == [(2, 16), (4, 16), (5, 8)]
    assert disk.most_writing == 1
    steps = {line["step"]: line["time/save_s"] > 0.0 for line in lines_of(trial.metrics_path)}
    assert not steps[1] and not steps[2] and not steps[3] and (steps[4] or steps[5])


@pytest.mark.parametrize("beside", [True, False])
def test_ranks_copy_for_a_commit_unless_they_are_told_to_write_first(begin: Begin, beside: bool) -> None:
    _, run = begin(f"control.commit_beside_training={str(beside).lower()}")
    trainers = Trainers()
    assert run(trainers) == WorkerExit.DONE
    assert trainers.saves_with_copies == [beside] * NUM_STEPS


def test_the_next_commit_waits_for_the_one_before_and_says_for_whom(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = begin("control.commit_every=1 step")
    disk = SlowDisk()
    waits: list[tuple[str, tuple[str, ...], int]] = []
    enter = Presence.enter

    def note(presence: Presence, phase: str, **said: Any) -> None:
        enter(presence, phase, **said)
        if phase == "commit":
            waits.append((phase, tuple(said["waits_for"]), len(trainers.trained)))
            disk.may_end.set()

    monkeypatch.setattr(Presence, "enter", note)
    trainers = Trainers(until_written=disk)
    assert run(trainers) == WorkerExit.DONE
    assert waits[0] == ("commit", ("model_worker/0",), 2)
    assert disk.most_writing == 1


def test_a_stop_waits_for_what_is_being_written_and_for_its_own_commit(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, run = begin("control.commit_every=2 steps")
    request = StopRequest(requested_at=0.0, by="me@here", now=False, grace_s=60.0)
    disk = SlowDisk()

    def look(name: str) -> None:
        if name == "train_step" and len(trainers.trained) == 2:
            trial.write_stop_request(request)

    async def until_written() -> None:
        if trial.read_stop_request() is not None:
            disk.may_end.set()
        await disk()

    monkeypatch.setattr(LogWatch, "check", lambda watch: watch._look())
    trainers = Trainers(at_call=look, until_written=until_written)
    enter = Presence.enter

    def note(presence: Presence, phase: str, **said: Any) -> None:
        enter(presence, phase, **said)
        if phase == "commit":
            disk.may_end.set()

    monkeypatch.setattr(Presence, "enter", note)
    assert run(trainers) == WorkerExit.DONE
    state = TrialLog(trial.log_path).read()
    assert state.is_stopped and [logged.commit.step for logged in state.lineage] == [2, 3]
    assert len(step_by_uid(trial)) == 24


def test_a_kill_while_a_commit_is_written_leaves_the_one_before_and_what_is_half_written_goes(begin: Begin) -> None:
    trial, run = begin("control.commit_every=1 step")
    half: list[str] = []

    async def until_written() -> None:
        if len(lost.trained) == 3:
            await asyncio.Event().wait()

    def die(name: str) -> None:
        if name == "train_step" and len(lost.trained) == 3:
            half.extend(path.name for path in trial.checkpoints_path.iterdir() if "step-00000003" in path.name)
            raise KilledError(name)

    lost, next_one = Trainers(at_call=die, until_written=until_written), Trainers()
    with pytest.raises(KilledError):
        run(lost)
    assert len(half) == 1 and (trial.checkpoints_path / half[0]).exists()
    assert [logged.commit.step for logged in TrialLog(trial.log_path).read().lineage] == [1, 2]
    assert run(next_one) == WorkerExit.DONE
    assert next_one.trained[0] == lost.trained[2]
    assert step_by_uid(trial) == {
        uid: step for step, uids in enumerate(lost.trained[:2] + next_one.trained, 1) for uid in uids
    }
    assert not (trial.checkpoints_path / half[0]).exists()


def test_a_disk_that_is_full_for_a_while_costs_a_commit_and_no_step(begin: Begin) -> None:
    trial, run = begin("control.commit_every=1 step")
    fulls = iter([False, True, True])
    trainers = Trainers(until_written=lambda: refuse(is_full=next(fulls, False)))
    assert run(trainers) == WorkerExit.DONE
    state = TrialLog(trial.log_path).read()
    assert state.epoch == 1 and len(trainers.trained) == NUM_STEPS
    commits = [logged.commit for logged in state.lineage]
    assert [(commit.step, commit.trained) for commit in commits] == [(1, 8), (4, 24), (5, 8)]
    notices = [event for event in read_journal(trial.journal_path) if event["event"] == "train_notice"]
    assert [(event["is_alarm"], event["text"]) for event in notices] == [
        (True, "step 2 could not be committed"),
        (True, "step 3 could not be committed"),
        (False, "step 4 could be committed"),
    ]
    assert notices[0]["causes"] == ["model_worker/0: [Errno 28] No space left on device"]
    assert notices[1]["details"] == "the last commit is that of step 1"
    assert {path.name[:13] for path in trial.checkpoints_path.iterdir()} == {"step-00000004", "step-00000005"}


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(errno.ENOSPC, WorkerExit.NO_ROOM), (errno.EDQUOT, WorkerExit.NO_ROOM), (errno.EIO, WorkerExit.CANNOT_CONTINUE)],
)
def test_a_trial_waits_for_room_on_a_disk_that_stays_full_and_ends_where_it_stays_broken(
    begin: Begin, caplog: pytest.LogCaptureFixture, number: int, exit_code: WorkerExit
) -> None:
    trial, run = begin("control.commit_every=1 step", "supervision.max_restarts=0")
    fulls = iter([False])
    trainers = Trainers(until_written=lambda: refuse(is_full=next(fulls, True), number=number))
    assert run(trainers) == exit_code
    assert [logged.commit.step for logged in TrialLog(trial.log_path).read().lineage] == [1]
    assert f"as 3 in a row could not: model_worker/0: [Errno {number}] No space left on device" in caplog.text


async def refuse(*, is_full: bool, number: int = errno.ENOSPC) -> None:
    if is_full:
        raise OSError(number, "No space left on device")
