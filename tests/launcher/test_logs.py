"""rl-logs: the right files, whole lines only, and the first cause."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from corral.experiments.trial_directory import TrialDirectory
from corral.launcher.logs import LogFile, NoLogsError, describe_failures, find_logs, follow


@pytest.fixture
def directory(tmp_path: Path) -> TrialDirectory:
    directory = TrialDirectory(tmp_path / "exp" / "trial")
    directory.create()
    for attempt in (0, 1):
        directory.start_attempt_logs(attempt)
        for worker in (("rollout_worker", 2), ("rollout_worker", 10), ("master_worker", 0)):
            directory.worker_log(attempt, *worker).write_text(f"{worker} {attempt}\n")
    return directory


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
    follow(lambda: find_logs(directory, []), lines.append, has_ended=lambda: next(script)(), poll_interval_s=0.001)
    assert [line.split(" | ")[1] for line in lines] == ["first half", "second", "new", "last"]
    assert lines[0].startswith("master_worker/0")


def test_the_first_cause_is_not_a_consequence(directory: TrialDirectory) -> None:
    for number, (worker, returncode, time) in enumerate(
        [
            ("model_worker/1", 76, 10.0),
            ("model_worker/0", -9, 10.1),
            ("master_worker/0", 75, 11.0),
            ("gserver_manager/0", 0, 1.0),
        ]
    ):
        record = {"worker": worker, "returncode": returncode, "time": time, "attempt": 1, "last_lines": ["boom"]}
        (directory.exits_path / f"1.{number}.json").write_text(
            json.dumps(record | {"signal": "SIGKILL" * (returncode == -9) or None})
        )
    text = describe_failures(directory, attempt=1)
    assert text.startswith("first failure: model_worker/0") and "SIGKILL" in text and "  boom" in text
    assert "model_worker/1 exit 76" in text and "gserver_manager" not in text
    assert describe_failures(directory, attempt=0) == "no worker has failed in attempt 0"
