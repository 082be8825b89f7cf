"""rl-track: each train step and evaluation once and as it counts, whoever dies meanwhile."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log import TrialLog
from corral.launcher.tracking import trackers
from corral.launcher.tracking.tracker import TrackedTrial
from corral.launcher.tracking.trackers import CommittedLines, MLflowRun, NewsCommand, PrometheusFile, mlflow_name
from tests.tracked import check_same, in_mlflow, in_prometheus, in_tensorboard, in_wandb, written
from tests.workers.master.trials import NUM_STEPS, KilledError, Trainers, lines_of, run_master, trial_of

BIN = Path(sys.executable).parent
OWN = """\
import json


class Lines:
    def __init__(self, folder, trial):
        self.file = folder.with_name("own.jsonl").open("w")

    def add(self, step, time_s, values):
        self.file.write(json.dumps([step, values]) + "\\n")

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()
"""


def planned_trial(folder: Path) -> tuple[RunPlan, TrialDirectory]:
    plan, trial = trial_of(folder)
    trial.plan_path.write_bytes(plan.to_json())
    return plan, trial


def rl_track(trial: Path, *arguments: str, exit_code: int = 0) -> str:
    command = [str(BIN / "rl-track"), str(trial), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=trial, env=os.environ)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_lines_that_are_told_are_those_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, trial = trial_of(tmp_path, "control.commit_every=2 steps")
    told: list[dict[str, Any]] = []
    lines = CommittedLines(trial)

    def dies_at(number: int) -> Trainers:
        def at_call(name: str) -> None:
            told.extend(map(dict, lines.new()))
            if name == "train_step" and len(trainers.trained) == number:
                raise KilledError

        trainers = Trainers(at_call=at_call)
        return trainers

    for number in (1, 3, 2):
        with pytest.raises(KilledError):
            run_master(plan, trial, dies_at(number), monkeypatch)
    assert run_master(plan, trial, dies_at(99), monkeypatch) == WorkerExit.DONE
    assert 0 < len(told) < NUM_STEPS  # the last ones are covered by the end of the trial alone
    told.extend(map(dict, lines.new()))
    assert lines.is_done and told == lines_of(trial.metrics_path)
    assert not list(lines.new())


def test_what_a_damaged_commit_takes_back_has_all_be_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = trial_of(tmp_path)
    lines = CommittedLines(trial)

    def dies(name: str) -> None:
        if name == "train_step" and len(trainers.trained) == 3:
            raise KilledError

    trainers = Trainers(at_call=dies)
    with pytest.raises(KilledError):
        run_master(plan, trial, trainers, monkeypatch)
    log = TrialLog(trial.log_path)
    commits = log.read().lineage  # of the third step, too, if there was time before the death
    assert [line["step"] for line in lines.new()] == [one.commit.step for one in commits] and not lines.begins_anew
    assert len(commits) > 1
    log.claim("another", resume=False).fall_back_to(commits[0].slot, reason="its checkpoint is damaged")
    assert [line["step"] for line in lines.new()] == [1] and lines.begins_anew
    assert list(lines.new()) == [] and not lines.begins_anew


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("eval/pass@4", "eval/pass_at_4"),
        ("reward/source/a (b)", "reward/source/a _b_"),
        ("reward/source/\u00fc:b\n", "reward/source/__b_"),
        ("a//b/../c/", "a/b/c"),
        ("/", "_"),
        ("x" * 300, "x" * 240),
    ],
)
def test_metrics_have_names_that_mlflow_takes(key: str, name: str) -> None:
    assert mlflow_name(key) == name


def test_two_metrics_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        """As much of MLflow's client as a run uses."""

        def __init__(self, uri: str) -> None:
            self.logged: list[tuple[str, float, int]] = []
            store.append(self)

        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="1")

        def search_runs(self, numbers: Sequence[str], query: str) -> list[Any]:
            return []

        def create_run(self, number: str, **tags: Any) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id="7"))

        def log_batch(self, run: str, *, metrics: Sequence[Any]) -> None:
            self.logged += metrics

    store: list[Store] = []
    modules = {"mlflow.entities": SimpleNamespace(Metric=lambda name, value, time_ms, step: (name, value, step))}
    modules["mlflow.tracking"] = SimpleNamespace(MlflowClient=Store)
    monkeypatch.setattr(trackers, "package", lambda name, _: modules[name])
    run = MLflowRun(tmp_path, cast(Any, SimpleNamespace(experiment="e", trial="t", uuid="u")))
    run.add(1, 0.0, {"eval/pass@4": 1.0, "eval/pass_at_4": 2.0})
    run.add(2, 0.0, {"eval/pass_at_4": 3.0})
    run.flush()
    assert store[0].logged == [("eval/pass_at_4", 1.0, 1), ("eval/pass_at_4_2", 2.0, 1), ("eval/pass_at_4_2", 3.0, 2)]


@pytest.mark.parametrize("to", ["tensorboard", "wandb", pytest.param("mlflow", marks=pytest.mark.slow)])
def test_trackers_have_what_metrics_jsonl_has_however_often_they_were_started(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = planned_trial(tmp_path)
    assert run_master(plan, trial, Trainers(), monkeypatch) == WorkerExit.DONE
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")  # which stays, with all runs
    for _ in range(2):
        assert f"{NUM_STEPS} lines of small-sft/t to {to}" in rl_track(trial.path, "--to", to)
    read = {"tensorboard": in_tensorboard, "wandb": in_wandb, "mlflow": in_mlflow}[to]
    check_same(read(trial), written(trial))


def test_a_tracker_of_ones_own_is_given_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, trial = planned_trial(tmp_path)
    assert run_master(plan, trial, Trainers(), monkeypatch) == WorkerExit.DONE
    lines = lines_of(trial.metrics_path)
    (trial.path / "own_tracker.py").write_text(OWN)
    rl_track(trial.path, "--to", "own_tracker:Lines", "--follow")
    own = [json.loads(line) for line in (trial.path / "tracking" / "own.jsonl").read_text().splitlines()]
    assert [step for step, _ in own] == [line["step"] for line in lines]
    assert all(values.items() <= line.items() for (_, values), line in zip(own, lines, strict=True))


def test_prometheus_reads_the_newest_numbers_with_units_by_its_conventions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = planned_trial(tmp_path)
    assert run_master(plan, trial, Trainers(), monkeypatch) == WorkerExit.DONE
    lines = lines_of(trial.metrics_path)
    for unit in ("model_worker", "redis"):
        Journal(trial.journal_path).append("unit_restarting", attempt=0, unit=unit)
    rl_track(trial.path, "--to", "prometheus")
    (path,) = (trial.path / "tracking" / "prometheus").iterdir()
    found = in_prometheus(path)
    assert found["corral_step"] == NUM_STEPS and found["corral_restarts_total"] == 2
    assert found["corral_data_samples_trained_total"] == lines[-1]["data/samples_trained"]
    assert found["corral_step_seconds/train"] == lines[-1]["time/train_s"]
    assert found["corral_last_line_timestamp_seconds"] == lines[-1]["time"]
    shared = tmp_path / "textfiles"
    shared.mkdir()
    monkeypatch.setenv("CORRAL_TEXTFILE_DIR", str(shared))
    tracker = PrometheusFile(trial.path / "unused", TrackedTrial.of(trial))
    for _ in range(2):
        tracker.add(7, 1.0, {"rewards/mean": 0.5, "train/tokens": 10.0})
    tracker.flush()
    (path,) = shared.iterdir()
    found = in_prometheus(path)
    assert path.stat().st_mode & 0o777 == 0o644
    assert found["corral_rewards_mean"] == 0.5 and found["corral_train_tokens_total"] == 20.0
    tracker.close()
    assert not list(shared.iterdir())


def test_a_command_hears_of_each_rule_once_when_it_begins_to_speak_and_its_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _, trial = planned_trial(tmp_path)
    heard = tmp_path / "heard"
    command = [sys.executable, "-c", f"import sys; open({str(heard)!r}, 'a').write(sys.stdin.read()); sys.exit(3)"]
    plan = json.loads(trial.plan_path.read_bytes())
    plan["config"]["tracking"] = {"to": ["command"], "command": command}
    trial.plan_path.write_text(json.dumps(plan))
    tracker = NewsCommand(tmp_path / "unused", TrackedTrial.of(trial))
    for step in range(1, 60):
        suffers = 11 <= step <= 30 or step > 45
        tracker.add(step, 0.0, {"train/tokens": 9.0, "no_eos_fraction": 0.9 if suffers else 0.0})
        tracker.flush()
    tracker.close()
    lines = [json.loads(line) for line in heard.read_text().splitlines()]
    assert [line["trial"] for line in lines] == ["small-sft/t"] * 2
    assert [line["step"] for line in lines] == [14, 49] and all("cut off" in line["text"] for line in lines)
    assert capfd.readouterr().out.count("returned non-zero exit status 3") == 2


def test_no_environment_variable_of_a_trial_leaves_it(tmp_path: Path) -> None:
    _, trial = planned_trial(tmp_path)
    plan = json.loads(trial.plan_path.read_bytes())
    plan["config"]["groups"]["master_worker"] = {"scheduling": {"env_vars": {"KEY": "hidden"}, "mem": 7}}
    trial.plan_path.write_text(json.dumps(plan))
    config = TrackedTrial.of(trial).config
    assert config["groups"]["master_worker"]["scheduling"] == {"mem": 7} and "hidden" not in json.dumps(config)


def test_a_tracker_that_is_not_there_is_refused(tmp_path: Path) -> None:
    _, trial = planned_trial(tmp_path)
    assert "no tracker 'wand'" in rl_track(trial.path, "--to", "wand", exit_code=2)
    assert "cannot be imported" in rl_track(trial.path, "--to", "nowhere:Thing", exit_code=2)
