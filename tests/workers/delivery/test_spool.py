import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from corral.workers.delivery import spool as spool_module
from corral.workers.delivery.spool import Spool, SpoolError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def _files(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != "lock")


def contents(spool: Spool) -> dict[str, list[bytes]]:
    return {uid: spool.payload(uid) for uid in spool.uids()}


def test_a_spooled_sample_cannot_be_spooled_again_until_it_is_discarded(directory: Path) -> None:
    with Spool(directory) as spool:
        spool.append("0:a", [b"first"])
        with pytest.raises(ValueError, match="'0:a' is in the spool"):
            spool.append("0:a", [b"second"])
        spool.discard(["0:a"])
        spool.append("0:a", [b"second"])
    with Spool(directory) as spool:
        assert spool.payload("0:a") == [b"second"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_record_that_the_file_system_does_not_give_now_stays_for_later(
    directory: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Spool(directory) as spool:
        spool.append("0:a", [b"first"])

    def fail(path: Path) -> bytes:
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with Spool(directory) as spool:
        assert spool.uids() == []
        spool.append("0:b", [b"second"])
        with pytest.raises(OSError, match="no"):
            spool.payload("0:b")
    monkeypatch.undo()
    with Spool(directory) as spool:
        assert contents(spool) == {"0:a": [b"first"], "0:b": [b"second"]}


def test_a_record_torn_at_any_byte_costs_itself_only(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Spool(directory) as spool:
        spool.append("0:a", [b"first"])
        spool.append("0:b", [b"second", b""])
    last = directory / _files(directory)[1]
    whole = last.read_bytes()
    for size in range(len(whole)):
        caplog.clear()
        last.write_bytes(whole[:size])
        with Spool(directory) as spool:
            assert contents(spool) == {"0:a": [b"first"]} and len(caplog.records) == 1
            spool.append("0:b", [b"again"])
            spool.discard(["0:b"])
        assert len(_files(directory)) == 1


@pytest.mark.parametrize("bit", [0x10, 0x80])  # of a text, the highest makes it none
def test_a_flipped_bit_costs_its_record_only(directory: Path, bit: int) -> None:
    with Spool(directory) as spool:
        spool.append("0:a", [b"", b"same size"])
        spool.append("0:b", [b"", b"same size"])
    first = directory / _files(directory)[0]
    whole = first.read_bytes()
    for index in range(len(whole)):
        first.write_bytes(whole[:index] + bytes([whole[index] ^ bit]) + whole[index + 1 :])
        with Spool(directory) as spool:
            assert contents(spool) == {"0:b": [b"", b"same size"]}


def test_the_newer_of_two_records_of_a_sample_counts(directory: Path) -> None:
    """A crash may undo a removal; what was made since must not go for it."""
    with Spool(directory) as spool:
        spool.append("0:a", [b"rejected"])
        (path,) = directory.glob("record-*")
        rejected = path.read_bytes()
        spool.discard(["0:a"])
        spool.append("0:a", [b"made anew"])
    path.write_bytes(rejected)
    with Spool(directory) as spool:
        assert contents(spool) == {"0:a": [b"made anew"]}
    assert len(_files(directory)) == 1


def test_a_record_changed_while_the_spool_is_open_is_refused(directory: Path) -> None:
    with Spool(directory) as spool:
        spool.append("0:a", [b"first"])
        path = directory / _files(directory)[0]
        path.write_bytes(path.read_bytes().replace(b"first", b"worst"))
        with pytest.raises(SpoolError, match="'0:a'.*changed on disk"):
            spool.payload("0:a")


def test_what_is_covered_takes_no_room(directory: Path) -> None:
    with Spool(directory) as spool:
        for index in range(12):
            spool.append(f"0:{index}", [bytes(90)])
        spool.discard([f"0:{index}" for index in range(12) if index != 3])
        assert len(_files(directory)) == 1


def test_a_failed_append_leaves_nothing_behind(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Spool(directory) as spool:
        spool.append("0:a", [b"first"])
        real = os.write

        def half(descriptor: int, data: bytes) -> int:
            real(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            with pytest.raises(OSError, match="No space"):
                spool.append("0:b", [b"second"])
        assert "0:b" not in spool.uids()
        spool.append("0:c", [b"third"])
    with Spool(directory) as spool:
        assert spool.uids() == ["0:a", "0:c"] and spool.payload("0:c") == [b"third"]


def test_a_record_is_on_disk_before_append_returns(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        real(descriptor)
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", record)
    with Spool(directory) as spool:
        spool.append("0:a", [b"first"])
        (name,) = _files(directory)
        assert synced == [(name, (directory / name).stat().st_size)]


def test_two_processes_cannot_hold_one_spool(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "_LOCK_TIMEOUT_S", 0.1)
    with Spool(directory), pytest.raises(SpoolError, match="held by another process"):
        Spool(directory)
    with Spool(directory):
        pass


def test_a_closed_spool_refuses_records(directory: Path) -> None:
    spool = Spool(directory)
    spool.close()
    spool.close()
    with pytest.raises(SpoolError, match="is closed"):
        spool.append("0:a", [])


def test_a_killed_process_loses_no_record_that_was_stored(directory: Path) -> None:
    code = (
        "import itertools, sys; from pathlib import Path; from corral.workers.delivery.spool import Spool\n"
        "spool = Spool(Path(sys.argv[1]))\n"
        "for i in itertools.count(int(sys.argv[2])):\n"
        "    spool.append(f'0:{i}', [str(i).encode() * 50, bytes(300)])\n"
        "    print('stored', i, flush=True)\n"
        "    if i % 3 == 0: spool.discard([f'0:{i}']); print('discarded', i, flush=True)\n"
    )
    stored: set[int] = set()
    discarded: set[int] = set()
    for start in (0, 1000, 2000):
        command = [sys.executable, "-c", code, str(directory), str(start)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(40)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().split("\n")[:-1]
        process.wait(timeout=120)
        process.stdout.close()
        for word, number in (line.split() for line in lines):
            (stored if word == "stored" else discarded).add(int(number))
    with Spool(directory) as spool:
        held = {int(uid.split(":")[1]) for uid in spool.uids()}
        assert stored - discarded <= held | {number for number in stored if number % 3 == 0}
        assert not held & discarded
        assert all(spool.payload(f"0:{number}")[0] == str(number).encode() * 50 for number in held)


class SpoolAgainstDict(RuleBasedStateMachine):
    """A spool, however often reopened or torn, holds what a dict would."""

    root: Path

    @initialize()
    def open(self) -> None:
        self.directory = self.root / f"spool-{len(os.listdir(self.root))}"
        self.expected: dict[str, list[bytes]] = {}
        self.spool = Spool(self.directory)

    @rule(number=st.integers(0, 9), payload=st.lists(st.binary(max_size=60), max_size=3))
    def append(self, number: int, payload: list[bytes]) -> None:
        uid = f"0:{number}"
        if uid not in self.expected:
            self.spool.append(uid, payload)
            self.expected[uid] = payload

    @rule(numbers=st.sets(st.integers(0, 9), max_size=6))
    def discard(self, numbers: set[int]) -> None:
        self.spool.discard([f"0:{number}" for number in numbers])
        for number in numbers:
            self.expected.pop(f"0:{number}", None)

    @rule()
    def reopen(self) -> None:
        self.spool.close()
        self.spool = Spool(self.directory)

    @precondition(lambda self: self.directory.exists())
    @rule(junk=st.binary(min_size=1, max_size=40))
    def crash_while_writing(self, junk: bytes) -> None:
        self.spool.close()
        newest = max((int(path.name.partition("-")[2]) for path in self.directory.glob("record-*")), default=0)
        (self.directory / f"record-{newest + 1:010d}").write_bytes(junk)
        self.spool = Spool(self.directory)

    @invariant()
    def same_as_the_dict(self) -> None:
        assert contents(self.spool) == self.expected and self.spool.uids() == list(self.expected)

    def teardown(self) -> None:
        self.spool.close()
        shutil.rmtree(self.directory)


def test_a_spool_behaves_like_a_dict_through_crashes(tmp_path: Path) -> None:
    class InThisDirectory(SpoolAgainstDict):
        root = tmp_path

    run_state_machine_as_test(
        InThisDirectory, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
    )
