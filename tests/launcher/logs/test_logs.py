"""rl-logs: the right files, whole lines only, and the first cause."""

import json
import re
import subprocess
import sys
import tarfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.exit_codes import CommandExit
from corral.experiments.trial.attempts import record_attempt
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import read_journal
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.launcher.files.file_thread import PatientFiles
from corral.launcher.follow import follow, logs_before
from corral.launcher.logs.failures import describe_failures
from corral.launcher.logs.files import LinePrinter, LogFile, LogFinder, NoLogsError, attempt_number
from corral.launcher.logs.lines import LineFilter, end_of_lines, parse_since, select_lines
from corral.launcher.trial.ends import exit_text
from corral.launcher.trial.view import TrialView
from tests.launcher.conftest import MakeTrial
from tests.launcher.trials import StubTrial


@pytest.fixture
def directory(tmp_path: Path) -> TrialDirectory:
    directory = TrialDirectory(tmp_path / "exp" / "trial")
    directory.create()
    for attempt in (0, 1):
        record_attempt(directory, attempt=attempt, resume=False, mode="slurm")
        directory.start_attempt_logs(attempt)
        for worker in (("rollout_worker", 2), ("rollout_worker", 10), ("master_worker", 0)):
            directory.worker_log(attempt, *worker).write_text(f"{worker} {attempt}\n")
    return directory


def find_logs(directory: TrialDirectory, selectors: Sequence[str], *, attempt: str | None = None) -> list[LogFile]:
    return LogFinder(directory, selectors, attempt=attempt).find()


def labels(files: Sequence[LogFile]) -> list[str]:
    return [file.label for file in files]


def test_logs_are_found_by_kind_index_and_attempt(directory: TrialDirectory) -> None:
    assert labels(find_logs(directory, [])) == ["master_worker/0", "rollout_worker/2", "rollout_worker/10"]
    assert labels(find_logs(directory, ["rollout_worker"])) == ["rollout_worker/2", "rollout_worker/10"]
    assert find_logs(directory, ["master_worker/0"], attempt="0")[0].path.parent.name == "attempt-0"
    assert labels(find_logs(directory, ["rollout_worker/2"], attempt="all")) == [
        "rollout_worker/2@0",
        "rollout_worker/2@1",
    ]


def test_what_is_no_workers_log_is_shown_to_who_asks_for_it(directory: TrialDirectory) -> None:
    (directory.attempt_logs(1) / "redis.log").write_text("ready\n")
    (directory.logs_path / "slurm-7.log").write_text("of job 7\n")
    for attempt in (0, 1):  # SLURM started the same job again
        write_event(directory, float(attempt), "submitted", attempt=attempt, job_id="7")
    assert not {"redis", "supervisor"} & set(labels(find_logs(directory, [])))
    assert labels(find_logs(directory, ["redis", "supervisor"])) == ["supervisor", "redis"]
    assert find_logs(directory, ["supervisor"])[0].path.read_text() == "of job 7\n"


def test_a_job_whose_workers_never_started_shows_its_batch_step(directory: TrialDirectory) -> None:
    directory.attempt_logs(2).mkdir()
    (directory.logs_path / "slurm-8.log").write_text("no such interpreter\n")
    write_event(directory, 1.0, "submitted", attempt=2, job_id="8")
    assert labels(find_logs(directory, [])) == ["supervisor"]


def test_an_attempt_is_one_that_there_was(directory: TrialDirectory) -> None:
    assert attempt_number(directory, None) is None and attempt_number(directory, "all") is None
    assert attempt_number(directory, "1") == 1
    for wrong in ("9", "x"):
        with pytest.raises(NoLogsError, match="there are"):
            attempt_number(directory, wrong)


def test_what_is_not_there_is_said_with_what_is(directory: TrialDirectory) -> None:
    with pytest.raises(NoLogsError, match="rollout_worker/10"):
        find_logs(directory, ["rollout_worker/3"])
    with pytest.raises(NoLogsError, match="there are 0, 1"):
        find_logs(directory, [], attempt="7")


def test_following_prints_whole_lines_and_new_files_until_the_end(directory: TrialDirectory) -> None:
    log = directory.worker_log(1, "master_worker", 0)
    lines: list[str] = []
    script = iter(
        [
            lambda: log.open("a").write("first ha") and False,
            lambda: log.open("a").write("lf\nsecond\n") and False,
            lambda: directory.worker_log(1, "gserver_manager", 0).write_text("new\n") and False,
            lambda: log.open("a").write("last\n") > 0,
        ]
    )
    finder = LogFinder(directory, [])
    before = {file.path: end_of_lines(file.path, files=PatientFiles()) for file in finder.find()}
    follow(
        finder.find,
        LinePrinter(write=lines.append),
        has_ended=lambda: next(script)(),
        read_before=before,
        poll_interval_s=0.001,
    )
    assert [line.split(" | ")[1] for line in lines] == ["first half", "second", "new", "last"]
    assert lines[0].startswith("master_worker/0")


def test_following_prints_all_that_was_written_before_the_end(directory: TrialDirectory) -> None:
    log = directory.worker_log(1, "master_worker", 0)
    written = [f"line {number} {'x' * 80}" for number in range(40_000)]
    log.write_text("\n".join([*written, "without an end"]))
    lines: list[str] = []
    follow(
        LogFinder(directory, ["master_worker"]).find,
        LinePrinter(write=lines.append, has_prefix=False),
        has_ended=lambda: True,
        read_before={},
    )
    assert lines == [*written, "without an end"]


def test_a_line_that_is_being_written_is_printed_once_and_whole(directory: TrialDirectory) -> None:
    log = directory.worker_log(1, "master_worker", 0)
    log.write_text("whole\nha")
    finder = LogFinder(directory, ["master_worker"])
    files, lines = finder.find(), list[str]()
    ends = {file.path: end_of_lines(file.path, files=PatientFiles()) for file in files}
    with log.open("a") as file:
        file.write("lf\n")  # between the tail and the first look
    printer = LinePrinter(write=lines.append, has_prefix=False)
    printer.tails(files, 100, ends=ends)
    follow(finder.find, printer, has_ended=lambda: True, read_before=ends)
    assert lines == ["whole", "half"]


def test_what_earlier_attempts_printed_is_not_followed(directory: TrialDirectory) -> None:
    lines: list[str] = []
    finder = LogFinder(directory, [], attempt="all")
    follow(
        finder.find,
        LinePrinter(write=lines.append, has_prefix=False),
        has_ended=lambda: True,
        read_before=logs_before(directory, 1),
    )
    assert lines and all(line.endswith(" 1") for line in lines)


def test_the_journal_is_read_again_only_after_it_has_changed(
    directory: TrialDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    monkeypatch.setattr(
        "corral.launcher.trial.view.read_journal", lambda path: reads.append(path) or read_journal(path)
    )
    write_event(directory, 1.0, "submitted", attempt=0, job_id="7")
    finder = LogFinder(directory, [], attempt="all")
    for _ in range(5):
        finder.find()
    assert len(reads) == 1
    write_event(directory, 2.0, "submitted", attempt=1, job_id="8")
    (directory.logs_path / "slurm-8.log").write_text("x\n")
    assert "supervisor@1" in {file.label for file in LogFinder(directory, ["supervisor"], attempt="all").find()}
    assert len(finder.find()) > 0 and len(reads) == 3


def test_the_last_lines_of_a_long_log_cost_no_more_than_they_are(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    size = 1 << 33
    with log.open("wb") as file:
        file.truncate(size)  # eight gigabytes that nobody could read in time
        file.seek(size)
        file.write(b"\n" + b"".join(b"line %d\n" % number for number in range(100_000)))
    lines = select_lines(log, files=PatientFiles(), count=50_000, chosen=LineFilter())
    assert lines == [f"line {number}" for number in range(50_000, 100_000)]


@pytest.mark.parametrize(
    "text", ["", "a", "a\n", "\n", "\n\n", "a\n\nb", "x" * 200_000 + "\nend", "y" * 70_000 + "\n" * 3]
)
def test_lines_read_from_the_end_are_those_read_from_the_beginning(text: str, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(text)
    for count in (None, 1, 2, 5):
        wanted = text.splitlines() if count is None else text.splitlines()[-count:]
        assert select_lines(log, files=PatientFiles(), count=count, chosen=LineFilter()) == wanted
    assert end_of_lines(log, files=PatientFiles()) == text.rfind("\n") + 1


@pytest.mark.parametrize(
    ("unit", "shown"), [(b"\r[#####     ] 50 %, of many", "[#####     ] 50 %, of many"), (b"0123456789abcdef", None)]
)
def test_a_line_of_any_length_costs_little_memory(unit: bytes, shown: str | None, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with log.open("wb") as file:
        file.write(b"before\n")
        for _ in range(64):
            file.write(unit * (1 + (1 << 20) // len(unit)))
        file.write(b"\r\nafter\n")
    tracemalloc.start()
    first, line, last = select_lines(log, files=PatientFiles(), count=None, chosen=LineFilter())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (first, last) == ("before", "after")
    assert line == shown if shown else (line.endswith(unit.decode()) and len(line) > 1000)
    assert peak_bytes < 20 << 20


def test_a_terminal_is_not_given_what_it_would_obey(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\x1b[31mred\x1b[0m\tanswer: \x1b]0;title\x07\x1b[2J\x07\xe2\x80\xae\xff\n 10%\r100% done\r\n")
    assert select_lines(log, files=PatientFiles(), count=None, chosen=LineFilter()) == [
        "red     answer: \\x07\\u202e\N{REPLACEMENT CHARACTER}",
        "100% done",
    ]


def test_what_another_end_explains_is_no_cause(directory: TrialDirectory) -> None:
    write_exit(directory, "model_worker/1", 76, 10.0, caused_by="another")
    write_exit(directory, "model_worker/0", -9, 10.1, why="SIGKILL", last_line="boom")
    write_exit(directory, "master_worker/0", 75, 11.0, caused_by="another")
    write_exit(directory, "gserver_manager/0", 0, 1.0)
    text = failures(directory, attempt=1)
    assert text.startswith("newest failure: model_worker/0 on n1, SIGKILL") and "  boom" in text
    assert "model_worker/1 exit 76" in text and "gserver_manager" not in text
    assert failures(directory, attempt=0) == "nothing has failed in attempt 0"


def write_step(directory: TrialDirectory, moment: float) -> None:
    with directory.metrics_path.open("a") as file:
        file.write(json.dumps({"time": moment, "step": 1, "train/tokens": 1}) + "\n")


def test_what_ended_the_trial_comes_first_and_what_healed_before_it_is_a_line(directory: TrialDirectory) -> None:
    write_exit(directory, "generation_server/0", -9, 10.0, why="SIGKILL", last_line="loading")
    write_event(directory, 12.0, "worker_started", worker="generation_server/0")
    write_step(directory, 20.0)
    write_exit(directory, "rollout_worker/0", 2, 70.0, why="exit 2 (data.jsonl has changed)", last_line="the end")
    write_exit(directory, "master_worker/0", -15, 71.0, caused_by="another")
    cause = "rollout_worker/0 exit 2 (data.jsonl has changed)"
    write_attempt_end(directory, 72.0, state="FAILED", cause=cause, caused_by="rollout_worker/0")
    lines = failures(directory, attempt=None).splitlines()
    assert lines[0].startswith("ended by: rollout_worker/0 on n1, exit 2 (data.jsonl has changed), ")
    assert lines[1:] == [
        "  the end",
        "then:",
        "  master_worker/0 SIGTERM +1.0s",
        "before:",
        "  generation_server/0 SIGKILL -60.0s",
    ]


def test_a_failure_has_healed_once_its_worker_runs_again_and_a_step_was_trained(directory: TrialDirectory) -> None:
    write_exit(directory, "rollout_worker/0", 1, 10.0, why="exit 1 (boom)")
    write_event(directory, 12.0, "worker_started", worker="rollout_worker/0")
    assert failures(directory, attempt=None).startswith("newest failure: rollout_worker/0")
    write_step(directory, 20.0)
    text = failures(directory, attempt=None)
    assert text.startswith("every failure has healed; the newest first:\n  rollout_worker/0 exit 1 (boom) ")


def test_what_the_end_of_a_complete_trial_has_ended_is_no_failure(directory: TrialDirectory) -> None:
    write_exit(directory, "redis", -9, 11.0, caused_by="the attempt ends, COMPLETE")
    write_attempt_end(directory, 12.0, state="COMPLETE", cause="")
    assert failures(directory, attempt=None) == "nothing has failed"
    write_exit(directory, "rollout_worker/0", 1, 5.0, why="exit 1 (boom)")
    assert len(failures(directory, attempt=None).splitlines()) == 2


def test_a_stop_and_its_kills_are_not_what_ended_a_later_attempt(directory: TrialDirectory) -> None:
    write_exit(directory, "master_worker/0", -9, 10.0, attempt=0, caused_by="another")
    write_attempt_end(directory, 11.0, attempt=0, state="STOPPED", cause="stopped by me")
    write_exit(directory, "rollout_worker/0", 2, 70.0, why="exit 2 (no data)")
    write_attempt_end(directory, 72.0, state="FAILED", cause="", caused_by="rollout_worker/0")
    assert failures(directory, attempt=None).startswith("ended by: rollout_worker/0 on n1, exit 2 (no data)")


def test_a_supervisor_without_an_end_is_told_with_the_end_of_its_log(directory: TrialDirectory) -> None:
    record_attempt(directory, attempt=3, resume=False, mode="local")
    directory.start_attempt_logs(3)
    (directory.attempt_logs(3) / "supervisor.log").write_text("Traceback ...\nAttributeError: no SimpleQueue\n")
    lines = failures(directory, attempt=None).splitlines()
    assert lines[0].startswith("attempt 3 has no end: its supervisor does not run")
    assert lines[1:] == ["  Traceback ...", "  AttributeError: no SimpleQueue"]


def test_what_the_trainer_goes_on_with_is_told_while_it_lasts(directory: TrialDirectory) -> None:
    notice = {"topic": "published weights", "text": "it is damaged", "details": "in v7", "step": 7, "attempt": 1}
    write_event(directory, 1.0, "train_notice", is_alarm=True, causes=["one byte"], **notice)
    told = ["ALARM at step 7: it is damaged; in v7", "  one byte"]
    assert failures(directory, attempt=None).splitlines() == ["no worker has failed", *told]
    assert failures(directory, attempt=0) == "nothing has failed in attempt 0"
    write_exit(directory, "rollout_worker/2", 1, 2.0)
    assert failures(directory, attempt=1).splitlines()[-2:] == told
    write_event(directory, 3.0, "train_notice", is_alarm=False, causes=[], **notice)
    assert "ALARM" not in failures(directory, attempt=1)


def test_what_is_wrong_now_besides_comes_first(directory: TrialDirectory) -> None:
    full = "the disk of /trials is full: 0.0 MB of 41.0 MB are free; make room, and the trial goes on by itself"
    said = failures(directory, attempt=None, troubles=[full]).splitlines()
    assert said == [f"trouble: {full}", "no worker has failed"]


def test_prompts_that_were_dropped_are_named_with_their_causes(directory: TrialDirectory) -> None:
    cause = "agent_error: KeyError: 'answer' (my_agents.py:12)"
    for step, dropped in enumerate([{"0:a": cause}, {}, {"0:b": "filtered: all are 1"}, {"0:c": cause, "0:d": "\x1b"}]):
        delta = {"epoch": 1, "step": 9 + step, "trained": {}, "dropped": dropped}
        (directory.ledger_path / f"1-{9 + step}-0123abcd.json").write_text(json.dumps(delta))
    (directory.ledger_path / "1-99-0123abcd.json").write_text("torn")
    told = ["dropped prompts: 3", f"  2 x {cause}: 0:a, 0:c", "  1 x \\x1b: 0:d"]
    assert failures(directory, attempt=None).splitlines() == ["no worker has failed", *told]


def failures(directory: TrialDirectory, **options: Any) -> str:
    return describe_failures(TrialView.open(directory), directory, **options)


def write_exit(
    directory: TrialDirectory, who: str, code: int, moment: float, *, why: str = "", last_line: str = "", **fields: Any
) -> None:
    end = {"attempt": 1, "who": who, "code": code, "why": why or exit_text(code), "node": "n1", "pid": 7, **fields}
    if last_line:
        kind, _, index = who.partition("/")
        log = directory.worker_log(1, kind, int(index))
        log.write_text(f"{last_line}\n")
        end["log_bytes"] = log.stat().st_size
        log.write_text(f"{last_line}\nof the next start\n")
    write_event(directory, moment, "task_ended", **end)


def write_attempt_end(directory: TrialDirectory, moment: float, *, attempt: int = 1, **fields: Any) -> None:
    end = {"attempt": attempt, "then": "", "ended_at": moment, **fields}
    (directory.control_path / f"end-{attempt}.json").write_text(json.dumps(end))


def write_event(directory: TrialDirectory, moment: float, event: str, **fields: object) -> None:
    with directory.journal_path.open("a") as file:
        file.write(json.dumps({"time": moment, "event": event, "attempt": 1, **fields}) + "\n")


def test_a_node_that_failed_explains_its_workers_though_they_were_seen_first(directory: TrialDirectory) -> None:
    write_exit(directory, "model_worker/0", -9, 10.0)
    write_exit(directory, "model_worker/1", 76, 10.5, node="n2")
    write_event(directory, 35.0, "node_failed", node="n1", cause="does not answer")
    write_attempt_end(directory, 36.0, state="NODE_FAILED", cause="n1")
    text = failures(directory, attempt=1)
    assert text.startswith("newest failure: node on n1, does not answer")
    assert "model_worker/0 SIGKILL -25.0s" in text and "attempt NODE_FAILED: n1 +1.0s" in text


def test_an_end_is_told_once_and_quotes_nothing_that_a_terminal_obeys(directory: TrialDirectory) -> None:
    write_exit(directory, "rollout_worker/0", 1, 10.0, why="exit 1 (\x1b[2Jbad\x07)")
    write_attempt_end(directory, 120.1, state="TIMED_OUT", cause="the time limit is near; resume it")
    text = failures(directory, attempt=None)
    assert text.count("TIMED_OUT") == 1 and "resume it" in text
    assert "\x1b" not in text and "(bad\\x07)" in text


def test_a_failure_long_before_the_end_did_not_end_the_attempt(directory: TrialDirectory) -> None:
    write_exit(directory, "rollout_worker/0", 1, 10.0, why="exit 1 (own fault)")
    write_attempt_end(directory, 9000.0, state="PREEMPTED", cause="")
    text = failures(directory, attempt=1)
    assert text.startswith("ended by: attempt, PREEMPTED, ")
    assert "before:\n  rollout_worker/0 exit 1 (own fault) -8990.0s" in text


@pytest.mark.parametrize("state", ["PREEMPTED", "TIMED_OUT", "CANCELLED", "NODE_FAILED"])
def test_an_end_from_outside_is_a_cause_and_slurms_own_words_are_shown(state: str, directory: TrialDirectory) -> None:
    write_exit(directory, "rollout_worker/0", -15, 11.0, caused_by="another")
    write_attempt_end(directory, 10.0, state=state, cause="by SLURM")
    (directory.logs_path / "slurm-7.log").write_text(
        "hello\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
    )
    text = failures(directory, attempt=None)
    assert text.startswith(f"ended by: attempt, {state}: by SLURM")
    assert "slurm-7.log | slurmstepd: error" in text and "hello" not in text
    assert "rollout_worker/0 SIGTERM +1.0s" in text


def test_a_supervisor_that_crashed_is_named_with_its_traceback(directory: TrialDirectory) -> None:
    write_attempt_end(directory, 10.0, state="FAILED", cause="supervisor: no space left", caused_by="supervisor")
    (directory.logs_path / "slurm-7.log").write_text("Traceback (most recent call last):\n  x\nOSError: no space\n")
    text = failures(directory, attempt=1)
    assert "supervisor: no space left" in text and "OSError: no space" in text


def test_a_job_that_died_without_any_record_shows_what_slurm_said(directory: TrialDirectory) -> None:
    (directory.logs_path / "slurm-7.log").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch\n")
    text = failures(directory, attempt=None)
    assert text.startswith("nothing has failed") and "oom_kill" in text


STAMPED = """2026-01-21 08:00:00,1 early
  of the early line
2026-01-21 08:10:00,1 late
  of the late line
2026-01-21 08:20:00,1 latest OOM
"""


def at(text: str) -> float:
    return time.mktime(time.strptime(f"2026-01-21 {text}", "%Y-%m-%d %H:%M:%S"))


def test_since_keeps_what_belongs_to_a_line_of_that_time(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(STAMPED)
    chosen = LineFilter(since=at("08:05:00"))
    assert select_lines(log, files=PatientFiles(), count=None, chosen=chosen) == STAMPED.splitlines()[2:]
    assert select_lines(log, files=PatientFiles(), count=1, chosen=chosen) == STAMPED.splitlines()[-1:]
    assert select_lines(log, files=PatientFiles(), count=None, chosen=LineFilter(since=time.time() + 5)) == []
    log.write_text("no times\nat all\n")
    assert select_lines(log, files=PatientFiles(), count=None, chosen=chosen) == ["no times", "at all"]
    assert select_lines(tmp_path / "none.log", files=PatientFiles(), count=None, chosen=chosen) == []


def test_since_finds_the_place_in_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    start = at("00:00:00")
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(start + second))},0 line {second} {'x' * 60}"
        for second in range(20_000)
    ]
    log.write_text("\n".join(lines) + "\n")
    for second in (0, 1, 9_999, 19_999):
        assert (
            select_lines(log, files=PatientFiles(), count=None, chosen=LineFilter(since=start + second))
            == lines[second:]
        )


def test_a_bundle_has_what_explains_a_failure_and_neither_secrets_nor_texts(make_trial: MakeTrial) -> None:
    key, row, said = 'a key of 24 letters: "\\', '{"question": "what is it?"}', "it is a zebra"
    trial = make_trial({}, task={"env_vars": {"API": key, "THREADS": "1"}})
    trial.prepare()
    directory = trial.directory
    hidden = [key, *Trust(directory.secrets_path).path.read_text().partition("-----END")[0].split()[-3:]]
    hidden += [secret.reveal() for secret in TrialSecrets.load(directory.secrets_path).values()]
    directory.start_attempt_logs(0)
    # Keys of the shell that submitted, which nobody here knows.
    printed = ["fed7c0de-0123", "sk-proj-" + 24 * "a", "hf_" + 34 * "b"]
    shown = [f"OPENAI_API_KEY={printed[0]}", repr({"MY_TOKEN": printed[0]}), *printed[1:], "num_tokens: 123456789"]
    lines = [f"reward own:f failed on {row[:-1]}: no", *hidden, json.dumps(hidden), *shown, "a last word"]
    hidden += printed
    directory.worker_log(0, "rollout_worker", 0).write_text("\n".join(lines))
    write_exit(directory, "rollout_worker/0", 1, time.time(), attempt=0, why=f"failed on {row}")
    write_event(directory, 0.0, "worker_failed", attempt=0, cause=f"with {key}, {row}")
    directory.metrics_path.write_text('{"step": 1}\n')
    directory.samples_path.mkdir()
    (directory.samples_path / "step-00000001-e1-r0.parquet").write_text(said)
    whole = read_bundle(trial, "whole.tar.gz", "--with-texts")
    plain = read_bundle(trial, "plain.tar.gz")
    for name in ("plan.json", "events.jsonl", "metrics.jsonl", "status.json", "doctor.txt", "versions.json"):
        assert f"trial/{name}" in plain
    log = plain["trial/logs/attempt-0/rollout_worker-0.log"]
    assert b"a last word" in log and b"OPENAI_API_KEY=***" in log and b"num_tokens: 123456789" in log
    for content in (whole, plain):
        everything = b"".join(content.values())
        for secret in hidden:
            assert secret.encode() not in everything and json.dumps(secret)[1:-1].encode() not in everything
    assert b"what is it?" not in b"".join(plain.values()) and said.encode() not in b"".join(plain.values())
    assert b"what is it?" in b"".join(whole.values()) and said.encode() in b"".join(whole.values())
    again = run_logs(trial, "--bundle", str(directory.path / "plain.tar.gz"))
    assert again.returncode == CommandExit.BAD_CONFIGURATION and "name a new file" in again.stderr


def run_logs(trial: StubTrial, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "rl-logs"), str(trial.directory.path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def read_bundle(trial: StubTrial, name: str, *arguments: str) -> dict[str, bytes]:
    path = trial.directory.path / name
    done = run_logs(trial, "--bundle", str(path), *arguments)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_lines_that_match_are_counted_after_they_are_chosen(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(STAMPED)
    found = select_lines(log, files=PatientFiles(), count=1, chosen=LineFilter(pattern=re.compile("early")))
    assert found == ["  of the early line"]


def test_moments_are_written_as_people_do() -> None:
    now = at("10:00:00")
    assert parse_since("10m", now=now) == now - 600
    assert parse_since("1.5h", now=now) == now - 5400
    assert parse_since("08:14", now=now) == at("08:14:00")
    assert parse_since("23:00", now=now) == at("23:00:00") - 86400
    assert parse_since("2026-01-21 08:14:02", now=now) == parse_since("2026-01-21T08:14:02", now=now) == at("08:14:02")
    with pytest.raises(ValueError, match="10m"):
        parse_since("yesterday", now=now)
