"""Looking at the trial directory: seldom while nothing happens, at once when asked, and never in the way."""

import os
from pathlib import Path

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.launcher.files.file_thread import FileThread
from corral.launcher.supervisor.trial_watch import TrialWatch
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
    watch, _, files = make_watch(tmp_path)
    for turn in range(101):
        watch.take(turn / 10.0, is_awaited=False)
        files.run(lambda: None, "wait for the look")
    assert watch.looks == 11


def test_a_look_that_was_asked_for_sees_what_was_there_when_it_was_asked(tmp_path: Path) -> None:
    watch, directory, _ = make_watch(tmp_path)
    watch.take(0.0, is_awaited=False)
    TrialLog(directory.log_path).claim("somebody")
    look = watch.ask(0.1)
    assert not watch.has_seen(look)
    seen = []
    wait_until(lambda: seen.extend(watch.take(0.2, is_awaited=True)) or watch.has_seen(look), "the look")
    assert [slot for one in seen for slot, _ in one.entries or ()] == [1]


def test_a_look_that_hangs_holds_up_neither_the_loop_nor_another_look(tmp_path: Path) -> None:
    watch, directory, _ = make_watch(tmp_path)
    os.mkfifo(directory.stop_request_path)
    look = watch.ask(0.0)
    for turn in range(100):
        assert watch.take(float(turn), is_awaited=True) == []
    assert not watch.has_seen(look)
    with directory.stop_request_path.open("wb"):
        pass  # it answers again
    wait_until(lambda: watch.take(100.0, is_awaited=True) or watch.has_seen(look), "the look")
