"""Critics and reward models: what they give, where their heads come from, and what is saved of them."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2ForSequenceClassification,
)

from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.heads import HEADS
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.training_helpers import (
    make_sample,
    optimizer_config,
    read_weights,
    save_tiny_model,
    score_loss,
    tiny_engine,
    value_loss,
)

LENGTHS = [[5, 17, 9], [30, 3], [2, 12]]
LOSSES = {"value": (value_loss, "prompt_mask"), "scalar": (score_loss, "seq_no_eos_mask")}
NUM_STEPS = 3


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "actor")


def make_engine(directory: Path, head: str, **overrides: Any) -> FSDPEngine:
    return tiny_engine(directory, max_tokens=40, head=head, **overrides)


def train(engine: FSDPEngine, head: str) -> None:
    loss_fn, counted = LOSSES[head]
    for step in range(NUM_STEPS):
        engine.train_batch(make_sample(LENGTHS, seed=step), loss_fn=loss_fn, counted=counted)


def answers(sample: SequenceSample) -> list[torch.Tensor]:
    ends = np.cumsum(sample.answer_lengths())[:-1]
    return [
        torch.as_tensor(ids, dtype=torch.long)[None] for ids in np.split(np.asarray(sample.data["input_ids"]), ends)
    ]


@torch.no_grad()
def token_values(directory: Path, sample: SequenceSample) -> npt.NDArray[np.float32]:
    """What transformers says of each answer by itself."""
    model: Any = AutoModelForTokenClassification.from_pretrained(directory, attn_implementation="eager").eval()
    return np.concatenate([model(input_ids=ids).logits[0, :, 0].numpy() for ids in answers(sample)])


@torch.no_grad()
def answer_scores(directory: Path, sample: SequenceSample) -> npt.NDArray[np.float32]:
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory, attn_implementation="eager").eval()
    return np.concatenate([model(input_ids=ids).logits[0].numpy() for ids in answers(sample)])


REFERENCES = {"value": ("values", token_values), "scalar": ("scores", answer_scores)}


@pytest.mark.parametrize("head", ["value", "scalar"])
def test_a_saved_head_says_the_same_in_transformers_and_here(head: str, actor: Path, tmp_path: Path) -> None:
    engine = make_engine(actor, head)
    train(engine, head)
    engine.save_weights(tmp_path)
    sample = make_sample(LENGTHS, seed=9)
    name, reference = REFERENCES[head]
    output = engine.forward(sample)
    assert output.keys() == {name}
    assert np.abs(output[name]).max() > 1e-2
    np.testing.assert_allclose(output[name], reference(tmp_path, sample), atol=1e-5)
    loaded = make_engine(tmp_path, head, optimizer=None, micro_batches=MicroBatchSpec())
    np.testing.assert_allclose(loaded.forward(sample)[name], output[name], atol=1e-5)


def test_a_reward_model_is_saved_as_what_the_field_knows_reward_models_as(actor: Path, tmp_path: Path) -> None:
    make_engine(actor, "scalar").save_weights(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen2ForSequenceClassification"]


@pytest.mark.parametrize("head", ["value", "scalar"])
def test_a_head_on_a_language_model_starts_at_zero_and_says_so(
    head: str, actor: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="corral.workers.backends.fsdp.loading"):
        engine = make_engine(actor, head)
    assert "its scores start at 0 and have to be trained" in caplog.text
    assert not engine.forward(make_sample(LENGTHS))[REFERENCES[head][0]].any()
    loss_fn, counted = LOSSES[head]
    losses = [
        engine.train_batch(make_sample(LENGTHS), loss_fn=loss_fn, counted=counted)["loss"] for _ in range(NUM_STEPS)
    ]
    assert losses[2] < losses[1] < losses[0]


def test_a_new_head_leaves_the_layers_of_the_language_model_as_they_were(actor: Path) -> None:
    layers = {name: tensor for name, tensor in read_weights(actor).items() if name != "lm_head.weight"}
    critic = dict(make_engine(actor, "value").export_weights())
    assert critic.keys() == layers.keys() | {"score.weight"}
    assert all(torch.equal(critic[name], layers[name]) for name in layers)


@pytest.mark.parametrize("head", ["value", "scalar"])
def test_steps_equal_those_of_a_plain_loop_over_answers(head: str, actor: Path) -> None:
    engine = make_engine(actor, head, optimizer=optimizer_config(weight_decay=0.0))
    train(engine, head)

    config = AutoConfig.from_pretrained(actor, num_labels=1)
    config.token_classification_bias, config.classifier_dropout = False, 0.0
    model: Any = AutoModelForTokenClassification.from_pretrained(actor, config=config, attn_implementation="eager")
    torch.nn.init.zeros_(model.score.weight)
    settings = optimizer_config()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0
    )
    for step in range(NUM_STEPS):
        sample = make_sample(LENGTHS, seed=step)
        values = [model(input_ids=ids).logits[0, :, 0] for ids in answers(sample)]
        if head == "value":
            mask = torch.as_tensor(sample.data["prompt_mask"])
            losses = (torch.cat(values) - 1.0).square()
        else:
            mask = torch.as_tensor(sample.data["seq_no_eos_mask"])
            losses = (torch.stack([value[-1] for value in values]) - torch.as_tensor(sample.data["rewards"])).square()
        optimizer.zero_grad()
        torch.autograd.backward((losses * mask).sum() / mask.sum())
        optimizer.step()
    expected = dict(model.named_parameters())
    for name, tensor in engine.export_weights():
        np.testing.assert_allclose(tensor, expected[name].detach(), atol=2e-5, err_msg=name)


def save_sequence_classifier(directory: Path, actor: Path, *, num_labels: int = 1) -> Path:
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(actor, num_labels=num_labels)
    Qwen2ForSequenceClassification(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("head", ["value", "scalar"])
def test_a_reward_model_of_others_keeps_its_head_in_either_role(
    head: str, actor: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_sequence_classifier(tmp_path, actor)
    engine = make_engine(directory, head, optimizer=None)
    weights = read_weights(directory)
    exported = dict(engine.export_weights())
    assert exported.keys() == weights.keys() and all(torch.equal(exported[name], weights[name]) for name in weights)
    assert "start at 0" not in caplog.text
    sample = make_sample(LENGTHS)
    expected = answer_scores(directory, sample)
    output = engine.forward(sample)[REFERENCES[head][0]]
    ends = np.cumsum(sample.answer_lengths()) - 1
    np.testing.assert_allclose(output if head == "scalar" else output[ends], expected, atol=1e-5)


def test_values_keep_float32_beside_bfloat16_layers(actor: Path, tmp_path: Path) -> None:
    directory = save_sequence_classifier(tmp_path, actor)
    engine = make_engine(directory, "value", optimizer=None, compute_dtype=torch.bfloat16)
    values = torch.as_tensor(engine.forward(make_sample(LENGTHS))["values"])
    assert not torch.equal(values, values.bfloat16().float())
    np.testing.assert_allclose(values, token_values(directory, make_sample(LENGTHS)), atol=0.1)


def test_a_rank_without_samples_gets_nothing_of_every_name(actor: Path) -> None:
    nothing = SequenceSample([], {"input_ids": []}, {"input_ids": np.empty(0, np.int32)})
    for head, strategy in HEADS.items():
        output = make_engine(actor, head, optimizer=None).forward(nothing)
        assert {name: values.shape for name, values in output.items()} == {name: (0,) for name in strategy.names}


def test_a_classifier_of_several_labels_is_refused(actor: Path, tmp_path: Path) -> None:
    save_sequence_classifier(tmp_path, actor, num_labels=2)
    with pytest.raises(ValueError, match="gives 2 numbers; a critic or reward model gives one"):
        make_engine(tmp_path, "scalar")


def save_without(directory: Path, source: Path, names: Sequence[str]) -> Path:
    """A copy of a model that lacks some weights."""
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    weights = {name: tensor for name, tensor in read_weights(source).items() if name not in names}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("head", list(HEADS))
def test_weights_that_are_missing_are_not_drawn_at_random(head: str, actor: Path, tmp_path: Path) -> None:
    directory = save_without(tmp_path / "torn", actor, ["model.norm.weight"])
    with pytest.raises(ValueError, match=r"lacks 1 weights of a Qwen2For\w+, such as 'model.norm.weight'"):
        make_engine(directory, head)


def test_a_reward_model_that_lost_its_head_is_not_taken_for_a_language_model(actor: Path, tmp_path: Path) -> None:
    whole = save_sequence_classifier(tmp_path / "whole", actor)
    with pytest.raises(ValueError, match="such as 'score.weight'"):
        make_engine(save_without(tmp_path / "torn", whole, ["score.weight"]), "scalar")


def test_a_critic_is_no_language_model(actor: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"such as 'lm_head.weight'; give .* a role whose head it has"):
        make_engine(save_sequence_classifier(tmp_path, actor), "lm")


def test_a_model_whose_classifier_has_another_name_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GPT2ForTokenClassification .* no linear layer 'score'"):
        make_engine(tmp_path, "value")
