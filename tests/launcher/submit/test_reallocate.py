"""A trial that is resumed with another allocation keeps all else of its plan, or is refused."""

from pathlib import Path

import pytest

from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.launcher.submit.prepare import Submission, prepare
from corral.launcher.submit.reallocate import reallocated
from corral.launcher.submit.start import create
from tests.experiments.broken_yaml import VALID_PPO, write_inputs


@pytest.fixture
def trial(tmp_path: Path) -> Submission:
    write_inputs(tmp_path)
    (tmp_path / "experiment.yaml").write_text(VALID_PPO)
    overrides = [f"cluster.fileroot={tmp_path / 'trials'}", "allocation=hf:d1+fsdp:d2"]
    submission = prepare(tmp_path / "experiment.yaml", overrides, trial_name="t", mode="local")
    create(submission)
    return submission


def kinds(plan: RunPlan) -> list[str]:
    return [worker.kind for worker in plan.workers]


def test_other_ranks_train_the_same_samples_of_the_same_trial(trial: Submission) -> None:
    before = RunPlan.from_json(trial.directory.plan_path.read_bytes())
    after = reallocated(before, trial.directory, "hf:d2+fsdp:d1")
    assert RunPlan.from_json(after.to_json()) == after
    assert after.trial == before.trial
    for kind, numbers in {"model_worker": (2, 1), "generation_server": (1, 2), "rollout_worker": (2, 2)}.items():
        assert (kinds(before).count(kind), kinds(after).count(kind)) == numbers
    for index in range(2):
        assert after.worker("rollout_worker", index) == before.worker("rollout_worker", index)
    assert after.master.model_copy(update={"meshes": {}, "sample_ranks": [0]}) == before.master.model_copy(
        update={"meshes": {}, "sample_ranks": [0]}
    )
    assert reallocated(after, trial.directory, "hf:d1+fsdp:d2").master == before.master


def test_an_allocation_that_does_not_fit_the_experiment_is_refused_as_at_submission(trial: Submission) -> None:
    with pytest.raises(ConfigError, match="allocation"):
        reallocated(trial.plan, trial.directory, "hf:d1+fsdp:d1@3+nothing")


def test_a_trial_whose_files_are_not_what_it_was_planned_from_is_refused(trial: Submission, tmp_path: Path) -> None:
    config = trial.directory.config_path
    text = config.read_text()
    config.write_text(text.replace("seed: 3", "seed: 4"))
    with pytest.raises(ConfigError, match="is not what the trial was planned from: seed differs"):
        reallocated(trial.plan, trial.directory, "hf:d1+fsdp:d1")
    config.write_text(text)
    rows = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(rows.replace("sum-0", "sum-x"))
    with pytest.raises(ConfigError, match="a data set of trial small-grpo/t has changed since it was submitted"):
        reallocated(trial.plan, trial.directory, "hf:d1+fsdp:d1")
