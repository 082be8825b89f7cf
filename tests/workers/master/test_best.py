"""exports/best: the weights that were evaluated best, wherever the master dies."""

from pathlib import Path

import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.evaluation import BestVersion
from corral.experiments.trial.journal import read_journal
from corral.launcher.trial.view import TrialView
from corral.workers.master import evaluations
from corral.workers.requests.messages import Evaluate
from tests.workers.master.trials import KilledError, Trainers, run_master, trial_of

VALUES = (0.1, 0.4, 0.8, 0.6, 0.8, 0.2)  # after so many steps


def best_trial(folder: Path, metric: str, *more: str) -> tuple[RunPlan, TrialDirectory]:
    return trial_of(
        folder,
        "evaluation.every=1 step",
        "evaluation.sampling.max_new_tokens=8",
        f"evaluation.dataset.path={folder / 'heldout.jsonl'}",
        "evaluation.dataset.max_prompt_tokens=16",
        f"evaluation.best={metric}",
        *more,
    )


def trainers_of_values() -> Trainers:
    def evaluate(request: Evaluate) -> dict[str, float]:
        return {"loss" if request.uids else "accuracy": VALUES[len(trainers.trained)]}

    trainers = Trainers(evaluate=evaluate)
    return trainers


@pytest.mark.parametrize(("metric", "step"), [("accuracy", 2), ("loss", 0)])
def test_the_best_weights_stay_whatever_comes_after(
    metric: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = best_trial(tmp_path, metric)
    assert run_master(plan, trial, trainers_of_values(), monkeypatch) == WorkerExit.DONE
    kept = BestVersion.read(trial.exports_path / "best")
    assert kept is not None and kept.version.endswith(f".{step}") and kept.value == VALUES[step]
    assert (trial.exports_path / "best" / "model.safetensors").exists()
    assert sorted(path.name for path in trial.exports_path.iterdir()) == ["best", "final"]


def test_it_is_there_again_if_the_master_dies_between_taking_the_old_away_and_naming_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = best_trial(tmp_path, "accuracy")
    remove = evaluations.Remover.remove

    def removes_and_dies(self: evaluations.Remover, path: Path) -> bool:
        removed = remove(self, path)
        if path.name == "best" and BestVersion.read(path.with_name(".evaluated")).value == 0.8:  # type: ignore[union-attr]
            raise KilledError
        return removed

    with monkeypatch.context() as patched:
        patched.setattr(evaluations.Remover, "remove", removes_and_dies)
        with pytest.raises(KilledError):
            run_master(plan, trial, trainers_of_values(), monkeypatch)
    assert not (trial.exports_path / "best").exists()
    worse = Trainers(evaluate=lambda request: {} if request.uids else {"accuracy": 0.3})
    assert run_master(plan, trial, worse, monkeypatch) == WorkerExit.DONE
    kept = BestVersion.read(trial.exports_path / "best")
    assert kept is not None and kept.value == 0.8


def test_a_number_that_no_evaluation_has_is_an_alarm_that_names_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = best_trial(tmp_path, "acuracy")
    assert run_master(plan, trial, trainers_of_values(), monkeypatch) == WorkerExit.DONE
    assert not (trial.exports_path / "best").exists()
    (finding,) = TrialView(read_journal(trial.journal_path), attempt=0).findings()
    assert finding.is_alarm and "'acuracy'" in finding.text
    assert finding.details.startswith("there are accuracy, count, loss, ")
