"""Experiments on preferences: what their files become, and what is wrong with rows that are no preferences."""

import json
from pathlib import Path

import pytest

from corral.experiments.errors import ConfigError
from corral.experiments.experiment import Experiment
from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan
from corral.experiments.registry import load_experiment
from corral.experiments.specs import read_dataset
from corral.experiments.worker_specs import ModelWorkerSpec
from corral.launcher.evaluation.plan import make_evaluation_config
from corral.scheduling.cadence import Frequency
from tests.experiments.broken_yaml import write_inputs

COMMON = """
name: small
dataset:
  path: pairs.jsonl
  max_prompt_tokens: 8
train_batch_size: 4
evaluation:
  dataset: {path: held_out.jsonl, max_prompt_tokens: 8}
"""
REWARD_MODEL = "experiment: reward_model\nreward: {path: model}\n" + COMMON
DPO = "experiment: dpo\nactor: {path: model}\nref: {path: model}\ndpo: {beta: 0.3}\n" + COMMON


def pair(number: int, **changes: object) -> dict[str, object]:
    return {"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": str(number)} | changes


def load(folder: Path, text: str, *overrides: str, rows: list[dict[str, object]] | None = None) -> Experiment:
    write_inputs(folder)
    for name, first in (("pairs.jsonl", 0), ("held_out.jsonl", 100)):
        given = [pair(first + number) for number in range(12)] if rows is None or first else rows
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in given))
    (folder / "experiment.yaml").write_text(text)
    return load_experiment(folder / "experiment.yaml", overrides)


def plan_of(experiment: Experiment, folder: Path) -> RunPlan:
    identity = TrialIdentity(experiment="small", trial="t", uuid="0" * 32, directory=folder)
    return make_run_plan(experiment, identity, "local")


def ranks_of(plan: RunPlan) -> list[ModelWorkerSpec]:
    return [worker for worker in plan.workers if isinstance(worker, ModelWorkerSpec)]


def test_a_reward_model_is_one_scalar_model_that_trains_and_evaluates_on_pairs(tmp_path: Path) -> None:
    plan = plan_of(load(tmp_path, REWARD_MODEL), tmp_path)
    (rank,) = ranks_of(plan)
    assert [(role.role, role.head) for role in rank.roles] == [("reward", "scalar")]
    assert [(call.name, call.implementation, call.input_keys) for call in plan.master.calls] == [
        ("reward_train", "paired_reward", ("input_ids",)),
        ("evaluate_rows", "paired_reward", ("input_ids",)),
    ]
    assert rank.dataset is not None and (rank.dataset.row_kind, rank.dataset.num_rows) == ("preferences", 12)
    assert rank.held_out is not None and rank.held_out.config.path == tmp_path / "held_out.jsonl"
    assert plan.master.published_role == "reward"


def test_a_reference_of_dpo_may_have_ranks_of_its_own(tmp_path: Path) -> None:
    apart = plan_of(load(tmp_path, DPO, "allocation=actor=fsdp:d2,ref=fsdp:d1"), tmp_path)
    roles = [[(role.role, role.optimizer is None, role.dpo.beta) for role in rank.roles] for rank in ranks_of(apart)]
    assert roles == [[("actor", False, 0.3)], [("actor", False, 0.3)], [("ref", True, 0.3)]]
    assert [worker.takes_samples for worker in ranks_of(apart)] == [True, True, False]
    graph = apart.master.step_plan.graph
    assert [call.name for call in graph.makers_of("evaluate_rows")] == ["ref_inf"]
    together = plan_of(load(tmp_path, DPO), tmp_path)
    assert [[role.role for role in rank.roles] for rank in ranks_of(together)] == [["actor", "ref"]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": None}, ["pairs.jsonl:2: 'chosen' is no chosen", "write it as text"]),
        ({"rejected": [7]}, ["pairs.jsonl:2: 'rejected' is no conversation: messages[0] is no object but int"]),
        ({"chosen": "5", "rejected": "5"}, ["pairs.jsonl:2: the chosen answer is the rejected one: 5"]),
    ],
)
@pytest.mark.parametrize("text", [REWARD_MODEL, DPO])
def test_a_row_that_is_no_preference_is_named(
    tmp_path: Path, text: str, row: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, rows=[pair(1), pair(2, **row), *(pair(number) for number in range(3, 12))])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("row", "excess"),
    [
        ({"prompt": "1" * 9}, "the prompt has 9 tokens, more than max_prompt_tokens 8"),
        (
            {"chosen": "1" * 8},  # 4 + 8 + 1 and 4 + 2 + 1 tokens
            "prompt and answer have 4 + 9 and 4 + 2 tokens, more than max_tokens_per_micro_batch 18",
        ),
    ],
)
@pytest.mark.parametrize("text", [REWARD_MODEL, DPO])
def test_a_preference_that_is_too_long_is_left_out(
    tmp_path: Path, text: str, row: dict[str, object], excess: str
) -> None:
    role = "reward" if text == REWARD_MODEL else "actor"
    rows = [pair(1), pair(2, **row), *(pair(number) for number in range(3, 12))]
    experiment = load(tmp_path, text, f"{role}.max_tokens_per_micro_batch=18", "evaluation=null", rows=rows)
    (warning,) = (text for text in experiment.find_warnings() if "left out" in text)
    assert warning.startswith("1 of 11 rows of the dataset are left out") and f"pairs.jsonl:2: {excess}" in warning
    assert read_dataset(experiment).num_rows == 10


def test_rows_of_another_kind_are_refused_with_the_key_that_names_the_field(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "1+1=", "better": "2", "worse": "3"}] * 4
    with pytest.raises(ConfigError, match="pairs.jsonl:1: row has no chosen .*\n.*\n.*name the row's field with"):
        load(tmp_path, DPO, rows=rows)
    keys = ("dataset.columns.chosen=better", "dataset.columns.rejected=worse")
    assert load(tmp_path, DPO, *keys, rows=rows).dataset.columns["chosen"] == "better"


def test_an_answer_longer_than_the_model_has_positions_is_refused(tmp_path: Path) -> None:
    rows = [pair(number, chosen="1" * 60) for number in range(12)]
    with pytest.raises(
        ConfigError, match="4 \\+ 61 and 4 \\+ 2 tokens, more than the model's max_position_embeddings 64"
    ):
        load(tmp_path, DPO, rows=rows)


def test_what_has_no_effect_is_said(tmp_path: Path) -> None:
    more = ("evaluation.sampling.max_new_tokens=8", "groups.model_worker.scheduling.gpu=0")
    overrides = ("dataset.columns.answer=a", *more)
    assert list(load(tmp_path, REWARD_MODEL, *overrides).find_warnings()) == [
        "dataset.columns.answer has no effect: rows of this experiment are preferences",
        "evaluation.sampling and evaluation.more have no effect: nothing is answered where rows are preferences",
    ]


def test_more_ranks_of_the_reference_than_rows_of_a_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_batch_size 4 leaves data-parallel ranks without work: .* 5 of ref"):
        load(tmp_path, DPO, "allocation=actor=fsdp:d1,ref=fsdp:d5")


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_inputs(tmp_path / "other")
    config = tmp_path / "other" / "model" / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 14', '"vocab_size": 15'))
    with pytest.raises(ConfigError, match="ref has a vocabulary of 15, the actor one of 14"):
        load(tmp_path, DPO, f"ref.path={tmp_path / 'other' / 'model'}")


def test_how_often_is_said_in_steps_epochs_or_seconds_and_commits_are_never_left_out(tmp_path: Path) -> None:
    overrides = ("evaluation.every=2 epochs", "control.save_every=60 seconds")
    master = plan_of(load(tmp_path, DPO, *overrides), tmp_path).master
    assert master.evaluate_every == Frequency(passes=2)
    assert master.control.save_frequency == Frequency(seconds=60.0)
    with pytest.raises(ConfigError, match="control.commit_every must be text, got null"):
        load(tmp_path, DPO, "control.commit_every=null")


def test_nobody_answers_problems_in_a_trial_on_preferences(tmp_path: Path) -> None:
    plan = plan_of(load(tmp_path, DPO), tmp_path)
    with pytest.raises(ConfigError, match="this trial learns from preferences, and nobody judges answers in it"):
        make_evaluation_config(plan, None, max_new_tokens=None)


def test_models_make_room_after_their_last_call_of_a_step_where_they_are_asked_to(tmp_path: Path) -> None:
    plan = plan_of(load(tmp_path, DPO, "actor.offload=between_calls", "ref.offload=between_calls"), tmp_path)
    assert {call.name: [hook.type for hook in call.post_hooks] for call in plan.master.calls} == {
        "ref_inf": ["offload"],
        "actor_train": ["publish_weights", "offload"],
        "evaluate_rows": [],
    }
    (stays, *_) = plan_of(load(tmp_path, DPO), tmp_path).master.calls
    assert stays.post_hooks == ()
