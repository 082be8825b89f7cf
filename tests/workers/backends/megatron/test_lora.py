"""Adapters beside Megatron's layers: against a plain loop over peft's model, in every layout, and between layouts.

peft's adapter of a tiny model ──► engine of each layout, 4 steps of AdamW ──► peft's files
                             └──► PeftModel, one answer after the other, torch.optim.AdamW ──► peft's files
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from corral.experiments.config.model import LoraConfig
from corral.workers.backends.base import AnyEngine
from corral.workers.backends.megatron.engine import MegatronEngine
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.layout_checks import Part, Scene, assert_part_is_alike, make_scene, make_variants
from tests.workers.backends.layout_scene import VARIANTS, Stats, Variant, make_engine, plain_loop, save_tiny, train
from tests.workers.backends.megatron_scene import make_megatron
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import read_weights

LORA = LoraConfig(rank=3, alpha=5.0)
START, END = "start", "end"  # folders of peft's beside a model
LAYOUTS = ("d1", "d2", "t2", "p2", "c2", "d2t2", "t2p2")
KINDS = ("qwen2", "qwen3", "plain_llama")


def save_with_adapter(kind: str, directory: Path) -> Path:
    """A tiny model, and an adapter of peft's beside all of its linear layers, which changes it from the beginning."""
    peft = pytest.importorskip("peft", reason="peft is not installed: make setup")
    save_tiny(kind, directory)
    torch.manual_seed(2)
    settings = peft.LoraConfig(
        r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules="all-linear", init_lora_weights=False
    )
    peft.get_peft_model(load(directory), settings).save_pretrained(directory / START)
    return directory


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def make_adapted(model: Path, context: ParallelContext, variant: Variant) -> MegatronEngine:
    lora = LORA.model_copy(update={"adapter": model / START})
    return make_megatron(model, context, Variant(lora=lora, recompute=variant.recompute))


def make_adapted_fsdp(model: Path, context: ParallelContext, variant: Variant) -> AnyEngine:
    lora = LORA.model_copy(update={"adapter": model / START})
    return make_engine(model, context, Variant(lora=lora, recompute=variant.recompute))


def peft_loop(directory: Path) -> tuple[Any, Stats]:
    """The model that a plain loop has made, base and adapter in one; the adapter is written beside it."""
    import peft

    def wrap(model: Any) -> Any:
        return peft.PeftModel.from_pretrained(model, directory / START, is_trainable=True)

    adapted, stats = plain_loop(directory, wrap=wrap)
    adapted.save_pretrained(directory / END)
    return adapted.merge_and_unload(), stats


def assert_adapters_are_alike(scene: Scene, directory: Path, part: Part) -> None:
    for kind in part.models:
        expected = read_weights(directory / kind / END)
        for layout in part.layouts:
            found = read_weights(scene.directory / kind / layout / "weights" / "adapter")
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                np.testing.assert_allclose(found[name], tensor, atol=1e-4, err_msg=f"{layout} {name}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_trained_as_by_a_plain_loop_over_pefts_model(kind: str, tmp_path: Path) -> None:
    part = Part(
        models=(kind,),
        layouts=dict.fromkeys(LAYOUTS, "none") | {"t2": "selective", "t2p2": "full"},
        chains=(
            *zip(LAYOUTS, (*LAYOUTS[3:], *LAYOUTS[:3]), strict=True),
            ("t2p2", "fsdp:d2t2", "d2", "fsdp:c2", "t2"),
        ),
    )
    scene = make_scene(
        tmp_path, part, save=save_with_adapter, make=make_adapted, make_fsdp=make_adapted_fsdp, plain=peft_loop
    )
    assert_part_is_alike(scene, part)
    assert_adapters_are_alike(scene, tmp_path, part)


@pytest.mark.slow
def test_adapters_and_score_layer_stay_float32_where_stages_compute_in_bfloat16(tmp_path: Path) -> None:
    name, layout = "lora of a critic in bfloat16", "t2p2"
    scene = make_variants(tmp_path, ((name, layout),), make=make_megatron, world_size=4)
    for rank in scene.ranks:
        for stats, own in zip(rank[f"{name} {layout}"]["stats"], scene.alone[name]["stats"], strict=True):
            assert stats["loss"] == pytest.approx(own["loss"], rel=VARIANTS[name].tolerance)
    version = tmp_path / f"{name} {layout}"
    adapter, expected = read_weights(version / "adapter"), read_weights(tmp_path / name / "adapter")
    assert adapter.keys() == expected.keys()
    for key, tensor in expected.items():
        assert adapter[key].dtype == torch.float32
        np.testing.assert_allclose(adapter[key], tensor, atol=VARIANTS[name].tolerance, err_msg=key)
    assert {tensor.dtype for tensor in read_weights(version).values()} == {torch.bfloat16}


def test_of_a_model_with_adapters_nothing_else_is_trained_kept_or_taken_over(tmp_path: Path) -> None:
    play(train_adapters_alone, tmp_path, world_size=1, directory=tmp_path)


def train_adapters_alone(_: ParallelContext, directory: Path) -> None:
    model = save_tiny("qwen2", directory / "model")
    base = read_weights(model)
    engine = make_megatron(model, ParallelContext(), Variant(lora=LORA, dtype=torch.bfloat16))
    shapes = [tensor.shape for name, tensor in base.items() if ".layers." in name and tensor.ndim == 2]
    assert engine.num_trained == LORA.rank * sum(map(sum, shapes))
    assert engine.num_parameters == sum(tensor.numel() for tensor in base.values())
    train(engine, range(2))
    optimizer = engine._optimizer
    moments = [state[name] for _, state in optimizer.state.items() for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert sum(moment.numel() for moment in moments) == 2 * engine.num_trained
    gradients = sum(buffer.grad_data.numel() for buffer in engine._trainee.buffers)
    assert engine.num_trained <= gradients < engine.num_parameters / 4  # Megatron rounds its buffers up
    for name, tensor in engine._weights.export():
        assert torch.equal(tensor, base[name].bfloat16()), name
    assert {tensor.dtype for tensor in engine.weight_shard().adapter.values()} == {torch.float32}

    engine.state_shard().write(directory / "state")
    with pytest.raises(ValueError, match="its own weights stay as they are"):
        engine.import_weights(base.items())
    other = make_megatron(save_tiny("qwen2", directory / "other", seed=5), ParallelContext(), Variant(lora=LORA))
    with pytest.raises(ValueError, match="trained beside other weights than those of .*other"):
        other.load_state(directory / "state")
