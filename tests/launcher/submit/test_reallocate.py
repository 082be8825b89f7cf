"""A trial that is resumed with another allocation keeps all else of its plan, or is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.launcher.submit.prepare import Submission, check_inputs, prepare, reallocated
from corral.launcher.submit.start import create, write_plan
from tests.experiments.broken_yaml import VALID_PPO, VALID_SFT, write_inputs
from tests.experiments.test_preferences import DPO, REWARD_MODEL, pair


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
    after, _ = reallocated(before, trial.directory, "hf:d2+fsdp:d1")
    assert RunPlan.from_json(after.to_json()) == after
    assert after.trial == before.trial
    for kind, numbers in {"model_worker": (2, 1), "generation_server": (1, 2), "rollout_worker": (2, 1)}.items():
        assert (kinds(before).count(kind), kinds(after).count(kind)) == numbers
    assert after.master.model_copy(update={"meshes": {}, "sample_ranks": [0]}) == before.master.model_copy(
        update={"meshes": {}, "sample_ranks": [0]}
    )
    assert reallocated(after, trial.directory, "hf:d1+fsdp:d2")[0].master == before.master


def test_an_allocation_that_does_not_fit_the_experiment_is_refused_as_at_submission(trial: Submission) -> None:
    with pytest.raises(ConfigError, match="allocation"):
        reallocated(trial.plan, trial.directory, "hf:d1+fsdp:d1@3+nothing")


def test_a_trial_whose_files_are_not_what_it_was_planned_from_is_refused(trial: Submission, tmp_path: Path) -> None:
    config = trial.directory.config_path
    text = config.read_text()
    config.write_text(text.replace("seed: 3", "seed: 4"))
    with pytest.raises(ConfigError, match="is not what the trial was planned from: seed differs"):
        reallocated(trial.plan, trial.directory, "hf:d1+fsdp:d1")


def test_a_trial_is_not_resumed_without_the_data_that_it_was_planned_with(trial: Submission, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    check_inputs(trial.plan)
    data.write_text(data.read_text().replace("sum-0", "sum-x"))
    with pytest.raises(ConfigError, match="has changed since the trial was submitted"):
        check_inputs(trial.plan)
    data.unlink()
    with pytest.raises(ConfigError, match="cannot be read any more"):
        check_inputs(trial.plan)


def moved(trial: Submission, allocation: str) -> Submission:
    """The trial after a resume with another allocation, its files written as the resume would."""
    plan, written = reallocated(RunPlan.from_json(trial.directory.plan_path.read_bytes()), trial.directory, allocation)
    again = replace(trial, plan=plan, written=written)
    write_plan(again)
    return again


ALLOCATIONS = {
    "sft": ("fsdp:d1", "fsdp:d2", "fsdp:d4"),
    "dpo": ("fsdp:d1", "fsdp:d2", "fsdp:d4"),
    "reward_model": ("fsdp:d1", "fsdp:d2", "fsdp:d4"),
    "ppo": ("fsdp:d1", "fsdp:d2", "fsdp:d4"),
    "async_ppo": ("hf:d1+fsdp:d1", "hf:d2+fsdp:d2", "hf:d1+fsdp:d4"),
}


@pytest.mark.parametrize("kind", ALLOCATIONS)
def test_every_kind_of_experiment_moves_as_if_it_had_been_submitted_so(kind: str, tmp_path: Path) -> None:
    first, *later = ALLOCATIONS[kind]
    trial = prepare(*experiment_of(kind, tmp_path), trial_name="t", mode="local")
    create(trial)
    assert first != later[0]
    for allocation in later:
        trial = moved(trial, allocation)
        file, overrides = experiment_of(kind, tmp_path)
        anew = prepare(file, [*overrides, f"allocation={allocation}"], trial_name="u", mode="local")
        assert anew.plan.scheduling == trial.plan.scheduling
        assert anew.plan.config == trial.plan.config
        assert anew.plan.workers == trial.plan.workers
        # What a trial keeps of its file can be submitted as a new one, too.
        assert prepare(trial.directory.config_path, (), trial_name="v", mode="local").plan.config == trial.plan.config


def test_fixed_and_elastic_workers_stay_as_many_as_they_were_over_two_moves(tmp_path: Path) -> None:
    file, overrides = experiment_of("async_ppo", tmp_path)
    elastic = ["groups.rollout_worker.elastic.count=4", "groups.rollout_worker.count=2"]
    trial = prepare(file, [*overrides, *elastic], trial_name="t", mode="local")
    create(trial)
    before = [worker for worker in trial.plan.workers if worker.kind == "rollout_worker"]
    assert len(before) == 6
    for allocation in ("hf:d2+fsdp:d2", "hf:d1+fsdp:d4"):
        trial = moved(trial, allocation)
        assert [worker for worker in trial.plan.workers if worker.kind == "rollout_worker"] == before
        group = trial.plan.scheduling["rollout_worker"]
        assert (group.count, group.total_count) == (2, 6)


def test_counts_that_only_repeat_the_allocation_follow_the_new_one(tmp_path: Path) -> None:
    file, overrides = experiment_of("async_ppo", tmp_path)
    counts = ["groups.model_worker.count=1", "groups.generation_server.count=1", "groups.model_worker.scheduling.cpu=1"]
    trial = prepare(file, [*overrides, *counts], trial_name="t", mode="local")
    create(trial)
    trial = moved(trial, "hf:d2+fsdp:d4")
    scheduling = trial.plan.scheduling
    assert (scheduling["model_worker"].count, scheduling["generation_server"].count) == (4, 2)
    assert scheduling["model_worker"].scheduling.cpu == 1


CPU = "groups:\n  model_worker: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}\n"


def experiment_of(kind: str, folder: Path) -> tuple[Path, list[str]]:
    """A small experiment of a kind, and what it is submitted with."""
    write_inputs(folder)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair(number)) + "\n" for number in range(12)))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(pair(number)) + "\n" for number in range(100, 104)))
    texts = {
        "sft": VALID_SFT,
        "dpo": DPO + CPU,
        "reward_model": REWARD_MODEL + CPU,
        "ppo": VALID_PPO.replace("async_ppo", "ppo")
        .replace("hf:d1+", "")
        .replace("  max_head_offpolicyness: 1\n", "")
        .replace("kl: {coef: 0.0}", "use_decoupled_loss: false")
        .replace("  generation_server: ", "  master_worker: "),
        "async_ppo": VALID_PPO,
    }
    (folder / "experiment.yaml").write_text(texts[kind])
    allocation = ALLOCATIONS[kind][0]
    return folder / "experiment.yaml", [f"cluster.fileroot={folder / 'trials'}", f"allocation={allocation}"]
