"""rl-submit --follow: the workers' lines until the end, and a terminal that may be left at any time."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.trial.attempts import read_end
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher import follow
from corral.launcher.commands.submit import main, normalise
from corral.launcher.submit import prepare, start
from tests.experiments.broken_yaml import VALID_PPO, write_inputs
from tests.launcher.stub_supervisor import COMMAND
from tests.launcher.trials import end_trials, wait_until


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_inputs(tmp_path)
    path = tmp_path / "experiment.yaml"
    path.write_text(VALID_PPO)
    monkeypatch.setenv("CORRAL_FILEROOT", str(tmp_path / "trials"))
    monkeypatch.setattr(start, "SUPERVISOR_COMMAND", COMMAND)
    yield path
    end_trials(tmp_path / "trials")


def _follow(experiment: Path, monkeypatch: pytest.MonkeyPatch, master: str) -> int:
    create = start.create

    def create_with_behaviour(submission: prepare.Submission) -> None:
        create(submission)
        (submission.directory.path / "stub.json").write_text(json.dumps({"master_worker/0": [master]}))

    monkeypatch.setattr(start, "create", create_with_behaviour)
    monkeypatch.setattr(sys, "argv", ["rl-submit", str(experiment), "--local", "-n", "f", "--follow"])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_follow_prints_what_the_workers_print_and_answers_with_the_end(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _follow(experiment, monkeypatch, "finish 0.5") == 0
    output = capsys.readouterr().out
    assert "| master_worker/0 attempt 0: finish 0.5" in output
    assert "| model_worker/0 attempt 0: wait" in output
    assert "\nsmall-grpo/f COMPLETE" in output


def test_leaving_does_not_stop_the_trial_and_says_so(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def left(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "follow_trial", left)
    assert _follow(experiment, monkeypatch, "finish 1.0") == 0
    assert "the trial keeps running; rl-stop small-grpo/f" in capsys.readouterr().out
    directory = TrialDirectory(tmp_path / "trials" / "small-grpo" / "f")
    ended = wait_until(lambda: read_end(directory, 0), "the trial's own end")
    assert ended.state == "COMPLETE"


def test_a_dry_run_needs_no_value() -> None:
    assert normalise(["a", "--dry-run", "-n", "x"]) == ["a", "--dry-run=plan", "-n", "x"]
    assert normalise(["a", "--dry-run=script", "--", "--dry-run"]) == ["a", "--dry-run=script", "--", "--dry-run"]
