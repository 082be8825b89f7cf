"""A trainer that dies at any system call of its commits, twice, and what the next epoch finds on a real disk.

All parts are real: trial log, checkpoints, ledger, spool, removal of old checkpoints. A "crash" makes every further
system call that changes the disk fail, so that no clean-up code runs either.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import Commit
from corral.workers.checkpoint.checkpoint import (
    CheckpointWriter,
    collect_garbage,
    committed_ledger,
    last_valid_commit,
    verify_checkpoint,
)
from corral.workers.checkpoint.durable_file import write_durable
from corral.workers.checkpoint.ledger import Ledger, numbers_of, read_delta, write_delta
from corral.workers.checkpoint.removal import Remover
from corral.workers.delivery.spool import Spool

_UIDS = ("0:a", "0:b", "0:c")
_ROWS = numbers_of("abc")
_CHANGING_CALLS = ("write", "fsync", "link", "rename", "unlink", "mkdir", "rmdir", "truncate", "ftruncate")


class Crash(BaseException):
    """The process is dead; no handler of the code under test may catch it."""


class CallCounter:
    """Counts the system calls that change the disk, and dies at the one with number `die_at`."""

    def __init__(self, die_at: int | None) -> None:
        self.calls = 0
        self._die_at = die_at

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self._die_at is not None and self.calls >= self._die_at:
                if name == "write" and self.calls == self._die_at:
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                raise Crash
            return real(*arguments, **named)

        return call


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The death of a process loses nothing that was written, so here fsync is a place to die at, and nothing more."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@contextmanager
def _counting(die_at: int | None) -> Iterator[CallCounter]:
    counter = CallCounter(die_at)
    with pytest.MonkeyPatch.context() as patch:
        for name in _CHANGING_CALLS:
            patch.setattr(os, name, counter.wrap(name, getattr(os, name)))
        yield counter


def _attempt(trial: TrialDirectory, spool: Spool) -> None:
    """One trainer epoch, from claim to done: a commit after every sample."""
    writer = TrialLog(trial.log_path).claim("trainer")
    point = last_valid_commit(writer.state, trial)
    assert not point.rejected, "a crash must not make a commit unreadable"
    ledger = committed_ledger(trial, point.commit, _ROWS) if point.commit else Ledger(_ROWS)
    spool.discard(list(filter(ledger.consumed, _UIDS)))
    step = point.commit.step if point.commit else 0
    while waiting := [uid for uid in _UIDS if not ledger.consumed(uid)]:
        assert waiting[0] in spool.uids(), "a sample left the spool before a commit covered it"
        step += 1
        ledger.train(step, waiting[:1])
        checkpoint = CheckpointWriter(trial, epoch=writer.epoch, step=step)
        names = " ".join(filter(ledger.consumed, _UIDS)).encode()
        checkpoint.add("state", {"names": write_durable(checkpoint.folder("state") / "names", [names])})
        checkpoint.add_ledger(ledger.states())
        digest = checkpoint.write_manifest({})
        delta = ledger.delta_for(epoch=writer.epoch, step=step)
        ledger_file, ledger_digest = write_delta(trial, delta)
        writer.commit(
            step=step,
            directory=checkpoint.relative_path,
            manifest_digest=digest,
            ledger_file=ledger_file,
            ledger_digest=ledger_digest,
            trained=1,
            dropped=0,
        )
        ledger.mark_committed(delta)
        spool.discard(waiting[:1])
        collect_garbage(trial, writer.state, epoch=writer.epoch, remover=Remover(), keep=2)
    writer.done()


def _run(root: Path, *deaths: int | None) -> tuple[TrialDirectory, int]:
    """Runs attempts that die at the given calls, then one that does not; returns the calls of the first."""
    trial = TrialDirectory(root)
    trial.create()
    with Spool(trial.spool_path(0)) as spool:
        for uid in _UIDS:
            spool.append(uid, [b"tokens"])
    calls = 0
    for die_at in (*deaths, None):
        spool = Spool(trial.spool_path(0))
        try:
            if TrialLog(trial.log_path).read().is_done:
                break
            with _counting(die_at) as counter:
                _attempt(trial, spool)
        except Crash:
            pass
        finally:
            spool.close()
        calls = calls or counter.calls
    return trial, calls


def _require_exactly_once(trial: TrialDirectory) -> None:
    state = TrialLog(trial.log_path).read()
    commits = [entry for _, entry in TrialLog(trial.log_path).poll() if isinstance(entry, Commit)]
    assert state.is_done and [logged.commit for logged in state.lineage] == commits
    deltas = [read_delta(trial, logged.commit) for logged in state.lineage]
    assert sorted(uid for delta in deltas for group in delta.trained.values() for uid in group) == sorted(_UIDS)
    assert state.last_commit is not None
    assert all(map(committed_ledger(trial, state.last_commit, _ROWS).consumed, _UIDS))
    with Spool(trial.spool_path(0)) as spool:
        assert set(spool.uids()) <= set(_UIDS)
    for logged in state.lineage[-2:]:
        folder = trial.inside(logged.commit.directory)
        verify_checkpoint(trial, logged.commit)
        assert (folder / "state" / "names").read_text().split() == list(_UIDS)[: logged.commit.step]


def test_a_crash_at_any_system_call_neither_loses_nor_repeats_a_sample(tmp_path: Path) -> None:
    trial, num_calls = _run(tmp_path / "undisturbed")
    _require_exactly_once(trial)
    assert num_calls > 60
    for die_at in range(1, num_calls + 1):
        trial, _ = _run(tmp_path / f"die-at-{die_at}", die_at)
        _require_exactly_once(trial)


def test_a_second_crash_during_recovery_is_no_different(tmp_path: Path) -> None:
    for number, (first, second) in enumerate((first, second) for first in (9, 31, 47) for second in range(1, 60, 4)):
        trial, _ = _run(tmp_path / str(number), first, second)
        _require_exactly_once(trial)
