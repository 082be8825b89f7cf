"""Looking at the trial directory: seldom while nothing happens, at once when asked, and never in the way."""

import os
import time
from pathlib import Path

import pytest

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.launcher.files.file_thread import FileThread
from corral.launcher.supervisor import supervisor
from corral.launcher.supervisor.supervisor import TrialWatch
from tests.launcher.trials import wait_until


class CountedWatch(TrialWatch):
    """Knows how often it has looked."""

    looks = 0

    def _look(self):  # type: ignore[no-untyped-def]
        self.looks += 1
        return super()._look()


def make_watch(tmp_path: Path) -> tuple[CountedWatch, TrialDirectory, FileThread]:
    directory, files = TrialDirectory(tmp_path / "trial"), FileThread("looks")
    directory.create()
    return CountedWatch(files, directory, TrialLog(directory.log_path), attempt=0), directory, files


def test_ten_turns_of_the_loop_in_a_second_take_one_look(tmp_path: Path) -> None:
    watch, _, _ = make_watch(tmp_path)
    for turn in range(101):
        watch.look(turn / 10.0, is_awaited=False)
    assert watch.looks == 11


def test_a_look_that_is_awaited_sees_what_is_there(tmp_path: Path) -> None:
    watch, directory, _ = make_watch(tmp_path)
    watch.look(0.0, is_awaited=False)
    TrialLog(directory.log_path).claim("somebody")
    assert watch.look(0.1, is_awaited=False) == ([], False)
    (seen,), has_read = watch.look(0.2, is_awaited=True)
    assert has_read and [slot for slot, _ in seen.entries or ()] == [1]


def test_a_look_that_hangs_holds_the_loop_up_once_and_what_it_finds_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FILE_TIMEOUT_S", 0.5)
    watch, directory, _ = make_watch(tmp_path)
    TrialLog(directory.log_path).claim("somebody")
    os.mkfifo(directory.stop_request_path)
    began = time.monotonic()
    for turn in range(100):
        assert watch.look(float(turn), is_awaited=True) == ([], False)
    assert time.monotonic() - began < 10.0
    with directory.stop_request_path.open("wb"):
        pass  # it answers again
    found, _ = wait_until(lambda: (seen := watch.look(100.0, is_awaited=True))[0] and seen, "the look")
    assert [slot for one in found for slot, _ in one.entries or ()] == [1]
