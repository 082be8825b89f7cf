"""The megatron backend trains like a plain loop over transformers, in every layout, and goes on where another stopped.

Engines are made in processes of their own, in which the CPU stands in for a GPU; an object collective fails a rank of
theirs (trainer_helpers.py).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForTokenClassification

from corral.experiments.config.model import Recompute
from corral.experiments.inputs.decoder_config import decoder_sizes, megatron_refusals
from corral.scheduling.memory.model import Adapters, RoleModel
from corral.scheduling.parallel import ParallelDims
from corral.workers.algorithms.base import response_mask
from corral.workers.backends.base import LossOutput, TokenScores
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.layout_checks import (
    MODES,
    Part,
    Scene,
    VariantScene,
    assert_goes_on_alike,
    assert_like_one_rank,
    assert_part_is_alike,
    assert_trained_alike,
    make_scene,
    make_variants,
)
from tests.workers.backends.layout_scene import VARIANTS, Variant, batch, make_engine, mesh_of, save_tiny
from tests.workers.backends.megatron_scene import make_megatron
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import read_weights, value_loss

FEW = Part(
    models=("odd_qwen3",),  # whose three layers two stages share unequally
    layouts={"d2t2": "none", "t2p2": "full", "t2c2": "selective"},
    chains=(("d2t2", "fsdp:t2c2", "t2p2"),),
)
LAYOUTS = ("d1", "d2", "t2", "p2", "c2", "d2t2", "d2p2", "d2c2", "t2p2", "t2c2", "c2p2", "d2t2p2")
CHAINS = tuple(zip(LAYOUTS, (*LAYOUTS[3:], *LAYOUTS[:3]), strict=True))
HEADS = (("value", "t2c2"), ("scalar", "c2"), ("value", "p2"))
ADAPTERS = (("lora", "t2p2"), ("lora with dropout", "d1"), ("lora of a critic", "t2c2"))
OTHERS = (("taught", "t2p2"), ("every algorithm", "p2"))
LOW = ("bfloat16", "p2")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("few"), FEW, make=make_megatron)


@pytest.mark.parametrize("layout", FEW.layouts)
def test_a_layout_trains_like_a_plain_loop(layout: str, few: Scene) -> None:
    assert_trained_alike(few, "odd_qwen3", layout)


@pytest.mark.parametrize("chain", FEW.chains)
def test_a_layout_goes_on_where_another_one_stopped_on_either_backend(chain: tuple[str, ...], few: Scene) -> None:
    assert_goes_on_alike(few, "odd_qwen3", chain)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "plain_llama"])
def test_every_layout_of_a_model_trains_and_goes_on_alike(kind: str, recompute: Recompute, tmp_path: Path) -> None:
    part = Part(models=(kind,), layouts=dict.fromkeys(LAYOUTS, recompute), chains=CHAINS if recompute == "none" else ())
    assert_part_is_alike(make_scene(tmp_path, part, make=make_megatron, world_size=8), part)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deep_qwen3", "deep_plain_llama"])
def test_more_than_two_stages_train_and_go_on_with_tied_and_untied_outputs(kind: str, tmp_path: Path) -> None:
    part = Part(models=(kind,), layouts={"p3": "none", "p4": "full"}, chains=(("p3", "p4", "p3"),))
    assert_part_is_alike(make_scene(tmp_path, part, make=make_megatron), part)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> VariantScene:
    return make_variants(
        tmp_path_factory.mktemp("heads"),
        (*HEADS, *ADAPTERS, *OTHERS, LOW),
        make=make_megatron,
        world_size=4,
    )


@pytest.mark.parametrize(("name", "layout"), (*HEADS, *ADAPTERS, *OTHERS))
def test_critics_reward_models_adapters_the_taught_and_every_algorithm_train_as_with_the_fsdp_backend(
    name: str, layout: str, heads: VariantScene
) -> None:
    assert_like_one_rank(heads, name, layout)


def test_weights_of_every_stage_are_bfloat16_where_products_are(heads: VariantScene) -> None:
    name, layout = LOW
    expected, tolerance = heads.alone[name], VARIANTS[name].tolerance
    for rank in mesh_of(layout).ranks:
        for stats, own in zip(heads.ranks[rank][f"{name} {layout}"]["stats"], expected["stats"], strict=True):
            assert stats["sft/loss"] == pytest.approx(own["sft/loss"], rel=tolerance)
    saved, own_weights = read_weights(heads.directory / f"{name} {layout}"), read_weights(heads.directory / name)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    for key, tensor in own_weights.items():
        np.testing.assert_allclose(saved[key].float(), tensor.float(), atol=tolerance, err_msg=key)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rotary positions of type"),
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
    ],
)
def test_a_model_that_megatron_would_compute_otherwise_is_refused(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(save_tiny("qwen2", tmp_path))
    assert not list(megatron_refusals(config.to_dict()))
    assert problem in " ".join(megatron_refusals({"model_type": "qwen2"} | config.to_dict() | change))


def test_weights_of_one_backend_blend_into_the_other(tmp_path: Path) -> None:
    play(blend, tmp_path, world_size=1, directory=tmp_path)


def blend(_: ParallelContext, directory: Path) -> None:
    ours = make_megatron(save_tiny("qwen2", directory / "ours"), ParallelContext(), Variant())
    theirs = make_engine(save_tiny("qwen2", directory / "theirs"), ParallelContext(), Variant())
    before = {name: tensor.clone() for name, tensor in ours.export_weights()}
    given = {name: tensor * 2.0 + 1.0 for name, tensor in theirs.export_weights()}
    ours.import_weights(given.items(), eta=0.25)
    after = dict(ours.export_weights())
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        np.testing.assert_allclose(tensor, 0.25 * given[name] + 0.75 * before[name], atol=1e-6, err_msg=name)
    with pytest.raises(ValueError, match="is no parameter of this model"):
        ours.import_weights([("model.nothing", given["model.norm.weight"])])
    with pytest.raises(ValueError, match="weights were not given"):
        ours.import_weights([("model.norm.weight", given["model.norm.weight"])])


def test_the_bias_of_a_score_layer_is_read_trained_and_given_as_by_the_fsdp_backend(tmp_path: Path) -> None:
    play(train_score_bias, tmp_path, world_size=1, directory=tmp_path)


def train_score_bias(_: ParallelContext, directory: Path) -> None:
    config = AutoConfig.from_pretrained(save_tiny("qwen2", directory / "base"))
    config.num_labels, config.classifier_dropout = 1, 0.0
    model = AutoModelForTokenClassification.from_config(config)
    torch.nn.init.constant_(model.score.bias, 0.5)
    model.save_pretrained(directory / "critic")
    ours, theirs = (
        make(directory / "critic", ParallelContext(), Variant(head="value")) for make in (make_megatron, make_engine)
    )
    for step in range(2):
        found, expected = (
            engine.train_batch(batch(step), loss_fn=value_loss, counted="prompt_mask") for engine in (ours, theirs)
        )
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    weights = dict(theirs.export_weights())
    assert weights["score.bias"].item() != 0.5
    for name, tensor in ours.export_weights():
        np.testing.assert_allclose(tensor, weights.pop(name), atol=1e-4, err_msg=name)
    assert not weights


def test_tokens_that_are_the_padding_of_a_model_are_trained_alike_by_both_backends(tmp_path: Path) -> None:
    play(train_padding_token, tmp_path, world_size=1, directory=tmp_path)


def train_padding_token(_: ParallelContext, directory: Path) -> None:
    sample = batch(0)
    padding = int(sample.data["input_ids"][0])  # a token of the row, as where it is eos too
    model = save_tiny("qwen2", directory / "model")
    config = AutoConfig.from_pretrained(model)
    config.pad_token_id = padding
    config.save_pretrained(model)
    before = read_weights(model)["model.embed_tokens.weight"][padding]
    embeddings, norms = [], []
    for make in (make_megatron, make_engine):
        engine = make(model, ParallelContext(), Variant(head="value"))
        norms.append(engine.train_batch(sample, loss_fn=value_loss, counted="prompt_mask")["train/grad_norm"])
        embeddings.append(dict(engine.export_weights())["model.embed_tokens.weight"][padding].clone())
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert not torch.equal(embeddings[1], before), "it has a gradient"
    np.testing.assert_allclose(embeddings[0], embeddings[1], atol=1e-5)


def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    play(step_without_a_number, tmp_path, world_size=1, directory=tmp_path)


def step_without_a_number(_: ParallelContext, directory: Path) -> None:
    engine = make_megatron(save_tiny("qwen2", directory / "model"), ParallelContext(), Variant(head="value"))
    before = {name: tensor.clone() for name, tensor in engine.export_weights()}

    def not_finite(values: Any, micro_batch: Any) -> LossOutput:
        return LossOutput(values.sum() * float("nan"))

    stats = engine.train_batch(batch(0), loss_fn=not_finite, counted="prompt_mask")
    assert (stats["train/skipped_nonfinite"], engine.step, engine.num_nonfinite) == (1.0, 0, 1)
    assert all(np.array_equal(tensor, before[name]) for name, tensor in engine.export_weights())


def test_the_memory_that_is_planned_for_is_what_an_engine_holds(tmp_path: Path) -> None:
    play(hold_what_was_planned, tmp_path, world_size=1, directory=tmp_path)


def hold_what_was_planned(_: ParallelContext, directory: Path) -> None:
    for kind, lora in (("qwen2", None), ("qwen3", None), ("plain_llama", None), ("qwen3", VARIANTS["lora"].lora)):
        model = save_tiny(kind, directory / kind)
        engine = make_megatron(model, ParallelContext(), Variant(lora=lora))
        engine.train_batch(select_for_training(batch(0)), loss_fn=no_loss)
        sizes = decoder_sizes(model)
        assert sizes is not None
        adapters = None
        if lora is not None:
            adapters = Adapters(rank=lora.rank, layers=frozenset(engine._adapters.layers if engine._adapters else ()))
        role = RoleModel(sizes=sizes, backend="megatron", optimizer="adamw", adapters=adapters)
        held = role.on_gpu("actor", ParallelDims(), []).held
        optimizer = engine._optimizer
        moments = [state[name] for _, state in optimizer.state.items() for name in ("exp_avg", "exp_avg_sq")]
        assert sum(tensor.nbytes for tensor in engine._trainee.parameters()) == held["parameters"]
        assert engine.num_trained * 4 == held["gradients"]
        assert sum(moment.numel() * moment.element_size() for moment in moments) == held["optimizer"]
        buffers = [buffer.grad_data.nbytes for buffer in engine._trainee.buffers]
        if lora is None:  # adapters are less than what Megatron rounds a buffer up to
            assert held["gradients"] <= sum(buffers) < 1.1 * held["gradients"]


def select_for_training(sample: SequenceSample) -> SequenceSample:
    return sample.with_key("loss_mask", response_mask(sample))


def no_loss(scores: TokenScores, _: MicroBatch) -> LossOutput:
    return LossOutput(scores.logprobs.sum() * 1e-3)
