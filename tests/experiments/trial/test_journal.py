import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from corral.experiments.trial.journal import Journal, event_line, read_journal

real_write = os.write


def test_events_come_back_in_order_with_their_fields(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.append("worker_started", worker="rollout_worker/0", attempt=1, pid=17)
    journal.append("task_ended", who="rollout_worker/0", cause="signal\n9 \u2603")
    first, second = read_journal(tmp_path / "events.jsonl")
    assert (first["event"], first["worker"], first["pid"]) == ("worker_started", "rollout_worker/0", 17)
    assert second["cause"] == "signal\n9 \u2603" and second["time"] >= first["time"]


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "events.jsonl") == []


def test_a_line_torn_at_any_byte_costs_that_event_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    journal.append("first")
    whole = path.read_bytes()
    journal.append("torn", worker="model_worker/0")
    torn = path.read_bytes()
    for size in range(len(whole), len(torn) - 1):
        path.write_bytes(torn[:size])
        assert [event["event"] for event in read_journal(path)] == ["first"]
        journal.append("after")
        assert [event["event"] for event in read_journal(path)] == ["first", "after"]


def test_a_line_that_was_cut_short_alarms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(event_line("cut")[:-3] + b"\n" + event_line("whole") + b"\n")
    with caplog.at_level(logging.WARNING):
        assert [event["event"] for event in read_journal(path)] == ["whole"]
    assert caplog.text == ""


def test_what_a_full_disk_refuses_is_told_before_the_next_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr("os.write", lambda descriptor, data: real_write(descriptor, data[:9]))
        journal.tell("fell_back", step=3)
        journal.tell("epoch_lost", epoch=1)
    assert read_journal(path) == []
    assert "not in the journal yet" in caplog.text and "fell_back" in caplog.text
    journal.tell("epoch_claimed", epoch=2)
    events = read_journal(path)
    assert [event["event"] for event in events] == ["fell_back", "epoch_lost", "epoch_claimed"]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)


def test_a_line_in_the_middle_that_is_no_event_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1, "event": "a"}\n[1, 2]\n{"time": 2, "event": "b"}\n')
    assert [event["event"] for event in read_journal(path)] == ["a", "b"]
    assert "line 2" in caplog.text


@pytest.mark.parametrize("fields", [{"time": 3}, {"path": Path("x")}, {"loss": float("nan")}])
def test_fields_that_cannot_be_written_are_refused_and_nothing_is(tmp_path: Path, fields: dict[str, object]) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises(ValueError, match="step_done"):
        Journal(path).append("step_done", **fields)
    assert not path.exists()


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from corral.experiments.trial.journal import Journal\n"
        "for i in range(200): Journal(Path(sys.argv[1])).append('tick', who=sys.argv[2], i=i, filler='x' * 500)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path), str(who)]) for who in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    events = [json.loads(line) for line in path.read_text().splitlines() if line]
    for who in range(3):
        assert [event["i"] for event in events if event["who"] == str(who)] == list(range(200))


def test_events_that_threads_tell_at_once_are_each_written_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    with ThreadPoolExecutor(8) as threads:
        for told in [threads.submit(journal.tell, "told", number=number) for number in range(400)]:
            told.result()
    assert sorted(event["number"] for event in read_journal(tmp_path / "events.jsonl")) == list(range(400))
