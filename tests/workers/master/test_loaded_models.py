"""An epoch begins by looking at what ranks have loaded; models that do not fit together end it."""

import json
from pathlib import Path

import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.scheduling.dataflow import DataflowGraph, build_dataflow
from corral.scheduling.model_function_call import ModelFunctionCall
from corral.workers.lifecycle.worker import BadConfigurationError
from corral.workers.master.epoch import check_reallocations
from corral.workers.requests.messages import LoadedModel
from tests.workers.master.trials import SHAPE, Trainers, run_master, trial_of


def graph_of(*hooks: dict[str, object]) -> DataflowGraph:
    call = {"name": "actor_train", "model_name": "actor", "call_type": "train_step", "implementation": "x"}
    return build_dataflow(
        [ModelFunctionCall.model_validate(call | {"n_seqs": 1, "input_keys": ["ids"], "post_hooks": hooks})], ["ids"]
    )


def test_models_that_give_each_other_weights_must_be_alike() -> None:
    other = LoadedModel(architecture="qwen2", num_parameters=90, num_layers=1, hidden_size=8, vocab_size=14)
    models = {"actor/0": SHAPE, "ref/0": other}
    check_reallocations(graph_of(), models)
    pushing = graph_of({"type": "push_weights", "target": "ref"})
    check_reallocations(pushing, models | {"ref/0": SHAPE})
    with pytest.raises(BadConfigurationError, match=r"'actor_train' .* actor/0 \(.* 2 layers.*ref/0 \(.* 1 layers"):
        check_reallocations(pushing, models)


def test_the_journal_says_what_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, trial = trial_of(tmp_path)
    assert run_master(plan, trial, Trainers(), monkeypatch) == WorkerExit.DONE
    events = [json.loads(line) for line in trial.journal_path.read_text().splitlines()]
    (loaded,) = (event for event in events if event["event"] == "models_loaded")
    assert loaded["models"]["actor/0"]["num_parameters"] == SHAPE.num_parameters
