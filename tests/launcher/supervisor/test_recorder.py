"""What cannot be told now is told later, in order, with the time at which it happened, and counted."""

import errno
import os
from pathlib import Path

from corral.experiments.trial.journal import Journal, read_journal
from corral.launcher.files.file_thread import FileThread
from corral.launcher.supervisor.recorder import Recorder


class FullJournal(Journal):
    """A journal on a disk that may be full."""

    is_full = False

    def append_line(self, line: bytes) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().append_line(line)


def test_events_are_kept_while_the_disk_is_full_and_written_in_order_when_it_is_not(tmp_path: Path) -> None:
    journal = FullJournal(tmp_path / "events.jsonl")
    recorder = Recorder(FileThread("records"), journal, attempt=3)
    recorder.event("first")
    journal.is_full = True
    recorder.event("second", worker="a")
    recorder.event("third")
    assert [event["event"] for event in read_journal(tmp_path / "events.jsonl")] == ["first"]
    journal.is_full = False
    recorder.close(timeout_s=10.0)
    events = read_journal(tmp_path / "events.jsonl")
    assert [event["event"] for event in events] == ["first", "second", "third", "records_late"]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert all(event["attempt"] == 3 for event in events)
    assert (events[-1]["late"], events[-1]["dropped"], events[-1]["cause"]) == (2, 0, "[Errno 28] " + os.strerror(28))


def test_files_that_are_refused_hold_up_no_journal(tmp_path: Path) -> None:
    tries: list[int] = []

    def refused() -> None:
        tries.append(0)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    recorder = Recorder(FileThread("records"), Journal(tmp_path / "events.jsonl"), attempt=0)
    recorder.keep(refused)
    recorder.event("told")
    recorder.close(timeout_s=0.5)
    assert tries
    assert [event["event"] for event in read_journal(tmp_path / "events.jsonl")] == ["told"]
