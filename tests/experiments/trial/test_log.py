import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from corral.experiments.trial import log as trial_logs
from corral.experiments.trial.log import DirectoryStorage, LogWriter, TrialLog
from corral.experiments.trial.log_state import (
    MOST_COMMITS,
    Claim,
    Commit,
    CorruptLogError,
    Done,
    DoneError,
    FallBack,
    LoggedCommit,
    LogState,
    Stop,
    StoppedError,
    SupersededError,
    TrialLogError,
    UncertainAppendError,
)
from corral.scheduling.policy_version import PolicyVersion


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.mkdir()
    return path


def _commit(writer: LogWriter, step: int) -> LoggedCommit:
    return writer.commit(
        step=step,
        directory=f"checkpoints/step-{step:08d}-e{writer.epoch}",
        manifest_digest="a" * 64,
        ledger_file=f"ledger/{writer.epoch}-{step}.json",
        ledger_digest="b" * 64,
        trained=4,
        dropped=0,
    )


def test_a_trial_is_claims_commits_and_done_in_numbered_files(path: Path) -> None:
    writer = TrialLog(path).claim("job 1")
    assert (writer.epoch, writer.state.head) == (1, 0)
    _commit(writer, 10)
    second = TrialLog(path).claim("job 2")
    assert (second.epoch, second.state.head) == (2, 2)
    assert second.state.last_commit is not None and second.state.last_commit.step == 10
    _commit(second, 20)
    second.done()
    assert sorted(os.listdir(path)) == ["00000001", "00000002", "00000003", "00000004", "00000005"]

    state = TrialLog(path).read()
    assert (state.epoch, state.owner, state.is_done, state.is_stopped) == (2, "job 2", True, False)
    assert state.last_commit is not None and state.last_commit.step == 20
    assert [(logged.slot, logged.commit.parent) for logged in state.lineage] == [(2, 0), (4, 2)]


def test_an_empty_log_has_nothing(path: Path) -> None:
    state = TrialLog(path).read()
    assert (state.epoch, state.last_commit, state.next_slot, state.lineage) == (0, None, 1, ())


def test_a_superseded_epoch_writes_nothing(path: Path) -> None:
    old = TrialLog(path).claim("old")
    _commit(old, 1)
    new = TrialLog(path).claim("new")
    before = sorted(os.listdir(path))
    for write in (lambda: _commit(old, 2), old.done, lambda: old.stop(by="me"), old.check):
        with pytest.raises(SupersededError, match="epoch 2 of new in slot 00000003"):
            write()
    assert sorted(os.listdir(path)) == before
    assert _commit(new, 2).commit.parent == 2


def test_a_stop_from_outside_ends_the_epoch_and_a_resume_continues(path: Path) -> None:
    writer = TrialLog(path).claim("job 1")
    _commit(writer, 1)
    log = TrialLog(path)
    slot = log.request_stop("ann@login", reason="maintenance")
    assert slot == 3 and TrialLog(path).request_stop("bob@login") == 3
    with pytest.raises(StoppedError, match=r"ann@login.*maintenance.*--resume"):
        _commit(writer, 2)
    with pytest.raises(StoppedError, match="--resume"):
        TrialLog(path).claim("job 2")
    resumed = TrialLog(path).claim("job 2", resume=True)
    assert resumed.epoch == 2 and not resumed.state.is_stopped
    assert _commit(resumed, 2).slot == 5
    with pytest.raises(StoppedError):
        _commit(writer, 2)
    with pytest.raises(SupersededError):
        writer.check()


def test_a_trial_stopped_before_it_began_does_not_begin(path: Path) -> None:
    TrialLog(path).request_stop("ann@login")
    with pytest.raises(StoppedError):
        TrialLog(path).claim("job 1")


def test_an_epoch_that_stops_itself_is_resumed_from_its_last_commit(path: Path) -> None:
    writer = TrialLog(path).claim("job 1")
    _commit(writer, 5)
    writer.stop(by="master_worker/0", reason="rl-stop")
    with pytest.raises(StoppedError):
        writer.done()
    last = TrialLog(path).claim("job 2", resume=True).state.last_commit
    assert last is not None and last.step == 5


def test_a_finished_trial_cannot_be_claimed_stopped_or_resumed(path: Path) -> None:
    writer = TrialLog(path).claim("job 1")
    writer.done()
    for act in (
        lambda: TrialLog(path).claim("job 2"),
        lambda: TrialLog(path).claim("job 2", resume=True),
        lambda: TrialLog(path).request_stop("ann"),
        lambda: _commit(writer, 1),
        writer.done,
    ):
        with pytest.raises(DoneError, match="epoch 1 finished"):
            act()


def test_a_reader_sees_new_entries_by_polling(path: Path) -> None:
    reader = TrialLog(path)
    assert reader.poll() == []
    writer = TrialLog(path).claim("job 1")
    _commit(writer, 1)
    kinds = [(slot, type(entry)) for slot, entry in reader.poll()]
    assert kinds == [(1, Claim), (2, Commit)] and reader.poll() == []
    TrialLog(path).request_stop("ann")
    assert [type(entry) for _, entry in reader.poll()] == [Stop] and reader.state.is_stopped


def test_reading_never_lists_the_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _commit(TrialLog(path).claim("job 1"), 1)

    def stale(*_: object) -> None:
        raise AssertionError("directory listings may be stale on a network file system")

    for name in ("listdir", "scandir", "stat", "access"):
        monkeypatch.setattr(os, name, stale)
    assert TrialLog(path).read().epoch == 1


def test_steps_never_fall_along_a_lineage(path: Path) -> None:
    writer = TrialLog(path).claim("job 1")
    _commit(writer, 5)
    _commit(writer, 5)  # the last prompts were dropped: the ledger grows, the weights stay
    with pytest.raises(ValueError, match="step 4 must not come before step 5"):
        _commit(writer, 4)
    assert TrialLog(path).read().next_slot == 4


def test_falling_back_leaves_the_corrupt_commit_out_of_the_lineage(path: Path) -> None:
    first = TrialLog(path).claim("job 1")
    for step in (10, 20, 30):
        _commit(first, step)
    second = TrialLog(path).claim("job 2")
    second.fall_back_to(2, reason="a shard is damaged")
    # Whoever reads the log knows it from now on, and not only once there is another commit.
    state = TrialLog(path).read()
    assert state.head == 2 and state.last_commit is not None and state.last_commit.step == 10
    assert [logged.commit.step for logged in state.lineage] == [10]
    assert _commit(second, 15).commit.parent == 2
    _commit(second, 25)
    third = TrialLog(path).claim("job 3")
    assert [logged.commit.step for logged in third.state.lineage] == [10, 15, 25]
    with pytest.raises(ValueError, match="no ancestor"):
        third.fall_back_to(3, reason="")
    with pytest.raises(ValueError, match="no ancestor"):
        third.fall_back_to(third.state.head, reason="")
    _commit(third, 26)
    with pytest.raises(ValueError, match="committed already"):
        third.fall_back_to(2, reason="")


def test_the_next_epoch_does_not_look_again_at_what_was_left_behind(path: Path) -> None:
    first = TrialLog(path).claim("job 1")
    for step in (10, 20):
        _commit(first, step)
    second = TrialLog(path).claim("job 2")
    second.fall_back_to(2, reason="x" * 10_000)
    third = TrialLog(path).claim("job 3")
    with pytest.raises(SupersededError):
        _commit(second, 20)
    assert third.state.head == 2
    assert _commit(third, 20).commit.parent == 2


def test_an_entry_must_fit_into_its_limit(path: Path) -> None:
    with pytest.raises(ValueError, match="4096"):
        TrialLog(path).claim("x" * 5000)
    assert os.listdir(path) == []


@pytest.fixture
def long_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> LogState:
    """Of 47 commits, with a snapshot at every tenth slot; what it says when all slots are read."""
    monkeypatch.setattr(trial_logs, "_SLOTS_BETWEEN_SNAPSHOTS", 10)
    writer = TrialLog(path).claim("job 1")
    for step in range(40):
        _commit(writer, step)
    writer = TrialLog(path).claim("job 2")
    for step in range(40, 47):
        _commit(writer, step)
    snapshot = (path / "snapshot").read_bytes()
    (path / "snapshot").unlink()
    state = TrialLog(path).read()
    (path / "snapshot").write_bytes(snapshot)
    return state


class _CountingStorage(DirectoryStorage):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.opened: list[int] = []

    def read(self, slot: int) -> bytes | None:
        self.opened.append(slot)
        return super().read(slot)


def _read_counting(path: Path) -> tuple[LogState, list[int]]:
    storage = _CountingStorage(path)
    return TrialLog(path, storage=storage).read(), storage.opened


def test_a_start_opens_the_slots_after_a_snapshot_and_finds_the_same(path: Path, long_log: LogState) -> None:
    state, opened = _read_counting(path)
    assert state == long_log and state.versions == (PolicyVersion(1, 39), PolicyVersion(2, 46))
    assert opened == [40, *range(41, 51)]
    writer = TrialLog(path).claim("job 3")
    writer.fall_back_to(state.lineage[-2].slot, reason="a shard is damaged")
    assert _commit(writer, 46).commit.parent == state.lineage[-2].slot
    assert writer.state.versions == (PolicyVersion(1, 39), PolicyVersion(2, 45), PolicyVersion(3, 46))


def test_a_state_has_room_for_the_newest_commits_only(path: Path) -> None:
    writer = TrialLog(path).claim("job 1")
    for step in range(MOST_COMMITS + 5):
        _commit(writer, step)
    state = TrialLog(path).read()
    assert [logged.commit.step for logged in state.lineage] == list(range(5, MOST_COMMITS + 5))
    with pytest.raises(ValueError, match="no ancestor"):
        TrialLog(path).claim("job 2").fall_back_to(2, reason="")


def test_a_snapshot_that_is_damaged_is_not_believed(path: Path, long_log: LogState) -> None:
    whole = (path / "snapshot").read_bytes()
    for damaged in (b"", whole[:-1], whole[:40], whole.replace(b'"epoch":1', b'"epoch":3'), b"\n", whole + b" "):
        (path / "snapshot").write_bytes(damaged)
        assert _read_counting(path) == (long_log, list(range(1, 51)))
    text = b'{"written_by":"a later version"}'
    (path / "snapshot").write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    assert _read_counting(path)[0] == long_log


def test_a_snapshot_does_not_hide_that_the_end_of_the_log_is_lost(path: Path, long_log: LogState) -> None:
    for slot in range(38, 50):
        (path / f"{slot:08d}").unlink()
    state, opened = _read_counting(path)
    assert state.next_slot == 38 and opened == [40, *range(1, 39)]
    # Another commit in its last slot is another log.
    _commit(TrialLog(path).claim("job 2"), 40)
    _commit(TrialLog(path).claim("job 3"), 40)
    assert TrialLog(path).read().epoch == 3


def test_a_commit_counts_though_no_snapshot_can_be_written(path: Path, long_log: LogState) -> None:
    (path / "snapshot").unlink()
    (path / "snapshot").mkdir()
    writer = TrialLog(path).claim("job 3")
    for step in range(50, 62):
        _commit(writer, step)
    assert TrialLog(path).read().last_commit == writer.state.last_commit


def _claim(epoch: int) -> Claim:
    return Claim(epoch=epoch, owner="o", nonce=f"c{epoch}")


def _entry(epoch: int, step: int, parent: int) -> Commit:
    texts = dict.fromkeys(["directory", "manifest_digest", "ledger_file", "ledger_digest", "nonce"], "x")
    return Commit(epoch=epoch, step=step, parent=parent, trained=0, dropped=0, **texts)


def _fallback(epoch: int, to: int) -> FallBack:
    return FallBack(epoch=epoch, to=to, reason="", nonce=f"f{epoch}")


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([_claim(2)], "next epoch is 1"),
        ([_claim(1), _claim(1)], "next epoch is 2"),
        ([_entry(1, 1, 0)], "superseded by epoch 0"),
        ([_claim(1), _claim(2), _entry(1, 1, 0)], "superseded by epoch 2"),
        ([_claim(1), _entry(1, 1, 1)], "continues slot 1, and the commit to continue is slot 0"),
        ([_claim(1), _entry(1, 1, 0), _entry(1, 2, 2), _claim(2), _entry(2, 2, 2)], "the commit to continue is slot 3"),
        ([_claim(1), _entry(1, 1, 0), _claim(2), _fallback(2, 2)], "slot 2 is no ancestor"),
        ([_claim(1), _entry(1, 1, 0), _entry(1, 2, 2), _fallback(1, 2)], "committed already"),
        ([_claim(1), _entry(1, 1, 0), _entry(1, 2, 2), _claim(2), _fallback(1, 2)], "superseded by epoch 2"),
        ([_claim(1), _entry(1, 3, 0), _entry(1, 2, 2)], "must not come before step 3"),
        ([_claim(1), Stop(epoch=None, by="a", reason="", nonce="s"), _entry(1, 1, 0)], "a stopped this trial"),
        ([_claim(1), Stop(epoch=None, by="a", reason="", nonce="s"), Done(epoch=1, nonce="d")], "a stopped this trial"),
        ([_claim(1), Done(epoch=1, nonce="d"), _claim(2)], "epoch 1 finished this trial"),
    ],
)
def test_a_log_that_breaks_the_rules_is_refused(path: Path, entries: list[Any], problem: str) -> None:
    for slot, entry in enumerate(entries, start=1):
        (path / f"{slot:08d}").write_bytes(msgspec.json.encode(entry))
    with pytest.raises(CorruptLogError, match=problem):
        TrialLog(path).read()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b'{"kind":"claim"}', b'{"kind":"later","nonce":"n"}', b"\xff" * 9, b" " * 5000]
)
def test_a_damaged_slot_is_named_and_never_skipped(path: Path, content: bytes) -> None:
    _commit(TrialLog(path).claim("job 1"), 1)
    (path / "00000002").write_bytes(content)
    with pytest.raises(CorruptLogError, match="00000002.*backup"):
        TrialLog(path).read()
    with pytest.raises(CorruptLogError):
        TrialLog(path).claim("job 2")


def test_a_slot_cut_at_any_byte_is_refused(path: Path) -> None:
    _commit(TrialLog(path).claim("job 1"), 1)
    whole = (path / "00000002").read_bytes()
    for size in range(len(whole)):
        (path / "00000002").write_bytes(whole[:size])
        with pytest.raises(CorruptLogError):
            TrialLog(path).read()


def test_files_of_dead_writers_are_ignored_and_swept_by_the_next_claim(path: Path) -> None:
    (path / ".00000001.0123456789abcdef.tmp").write_bytes(b'{"kind":')
    (path / ".00000009.0123456789abcdef.tmp").write_bytes(b"a live writer, for all we know")
    (path / ".notes.tmp").write_bytes(b"")
    TrialLog(path).claim("job 1")
    TrialLog(path).claim("job 2")
    assert sorted(os.listdir(path)) == [".00000009.0123456789abcdef.tmp", ".notes.tmp", "00000001", "00000002"]


Link = Callable[[Path, Path], None]


def _patch_link(monkeypatch: pytest.MonkeyPatch, fake: Callable[[Link, Path, Path], None]) -> None:
    real: Link = os.link
    monkeypatch.setattr(os, "link", lambda source, target: fake(real, source, target))


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO, errno.ESTALE])
def test_a_lost_reply_to_a_link_that_succeeded_counts_as_success(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def lose_reply(real: Link, source: Path, target: Path) -> None:
        real(source, target)
        raise OSError(code, os.strerror(code))

    _patch_link(monkeypatch, lose_reply)
    writer = TrialLog(path).claim("job 1")
    assert _commit(writer, 1).slot == 2
    assert TrialLog(path).read().next_slot == 3


def test_a_link_that_fails_once_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def stale_once(real: Link, source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 1:
            source.unlink()  # as if the next claim had swept it
        real(source, target)

    _patch_link(monkeypatch, stale_once)
    assert TrialLog(path).claim("job 1").epoch == 1 and len(calls) == 2


def test_after_an_append_that_may_have_happened_the_epoch_is_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TrialLog(path).claim("job 1")

    def broken(real: Link, source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        _patch_link(patch, broken)
        with pytest.raises(UncertainAppendError, match="Input/output error"):
            _commit(writer, 1)
    with pytest.raises(UncertainAppendError, match="claim a new epoch"):
        _commit(writer, 1)
    assert TrialLog(path).claim("job 2").epoch == 2


def test_a_file_system_without_hard_links_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(real: Link, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    _patch_link(monkeypatch, refused)
    with pytest.raises(TrialLogError, match="refuses hard links.*NFS"):
        TrialLog(path).claim("job 1")


def test_a_full_disk_fails_the_commit_but_not_the_epoch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TrialLog(path).claim("job 1")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            _commit(writer, 1)
    assert sorted(os.listdir(path)) == ["00000001"]
    assert _commit(writer, 1).slot == 2


def test_an_entry_that_may_not_be_on_disk_ends_the_epoch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TrialLog(path).claim("job 1")
    real = os.fsync
    calls: list[int] = []

    def fail_for_the_directory(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_the_directory)
    with pytest.raises(UncertainAppendError, match="perhaps not on disk"):
        _commit(writer, 1)
    with pytest.raises(UncertainAppendError):
        writer.done()
    last = TrialLog(path).claim("job 2").state.last_commit
    assert last is not None and last.step == 1


def test_a_slot_that_a_cache_still_hides_is_waited_for(path: Path) -> None:
    class HidingStorage(DirectoryStorage):
        hidden = 3

        def read(self, slot: int) -> bytes | None:
            if self.hidden:
                self.hidden -= 1
                return None
            return super().read(slot)

    TrialLog(path).claim("job 1")
    assert TrialLog(path, storage=HidingStorage(path)).claim("job 2").epoch == 2


def test_eight_processes_that_claim_at_once_get_consecutive_epochs(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from corral.experiments.trial.log import TrialLog\n"
        "sys.stdin.read(1)\n"
        "print(*[TrialLog(Path(sys.argv[1])).claim(sys.argv[2]).epoch for _ in range(25)])"
    )
    command = [sys.executable, "-c", code, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, f"writer {index}"], **pipes) for index in range(8)]
    answers = [process.communicate("g", timeout=120)[0] for process in processes]
    epochs = [[int(word) for word in answer.split()] for answer in answers]
    assert sorted(epoch for own in epochs for epoch in own) == list(range(1, 201))
    assert all(own == sorted(own) for own in epochs)
    assert sorted(os.listdir(path)) == [f"{slot:08d}" for slot in range(1, 201)]
    owners = [entry.owner for _, entry in TrialLog(path).poll() if isinstance(entry, Claim)]
    assert all(owners[epoch - 1] == f"writer {index}" for index, own in enumerate(epochs) for epoch in own)


def test_a_killed_writer_loses_no_commit_that_it_was_told_of(path: Path) -> None:
    code = (
        "import itertools, sys; from pathlib import Path; from corral.experiments.trial.log import TrialLog\n"
        "writer = TrialLog(Path(sys.argv[1])).claim('job', resume=True)\n"
        "last = writer.state.last_commit\nfirst = last.step + 1 if last else 1\n"
        "for step in itertools.count(first):\n"
        "    writer.commit(step=step, directory='d', manifest_digest='m', ledger_file='l', ledger_digest='s',"
        " trained=0, dropped=0)\n"
        "    print(step, flush=True)\n"
    )
    for attempt in range(1, 4):
        process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(7 * attempt)]
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().split("\n")[:-1]]
        process.wait(timeout=120)
        process.stdout.close()
        steps = [logged.commit.step for logged in TrialLog(path).read().lineage]
        assert steps == list(range(1, steps[-1] + 1))[-len(steps) :] and told[-1] <= steps[-1] <= told[-1] + 1
        assert TrialLog(path).read().epoch == attempt
