"""Kinds of models that packed rows change are refused where they are loaded, and no others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from corral.experiments.config.model import LoraConfig
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import optimizer_config, save_tiny_model

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SOUND: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
}
CHANGED: dict[str, dict[str, Any]] = {
    "doge": {"keep_window_size": 4},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "llama4_text": {"intermediate_size_mlp": 48, "num_local_experts": 2},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 4, "num_local_experts": 2},
}


def save(kind: str, directory: Path, **overrides: Any) -> Path:
    """A tiny model of a kind, far enough from its first values that each of its layers counts."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    auto_class: Any = AutoModelForCausalLM
    model = auto_class.from_config(CONFIG_MAPPING[kind](**SHAPE | overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.6 if "embed" in name else 0.1))
    model.save_pretrained(directory)
    return directory


def load(directory: Path, context: ParallelContext | None = None, **settings: Any) -> FSDPEngine:
    return FSDPEngine(directory, context=context or ParallelContext(), optimizer=optimizer_config(), **settings)


# What is rounded differs more: in float32, one of each stands for all.
@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.bfloat16) for kind in SOUND), ("qwen3_moe", torch.float32)])
def test_a_kind_that_keeps_sequences_apart_is_taken(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    load(save(kind, tmp_path, **SOUND[kind]), compute_dtype=dtype)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.bfloat16) for kind in CHANGED), ("doge", torch.float32)])
def test_a_kind_that_packed_rows_change_is_refused(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = save(kind, tmp_path, **CHANGED[kind])
    with pytest.raises(ValueError, match=rf"of the kind '{kind}' computes other numbers .* are 0\.\d+ of their size"):
        load(directory, compute_dtype=dtype)


def test_a_kind_whose_code_cannot_compute_packed_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a model of the kind 'stablelm' fails on two sequences in one packed row"):
        load(save("stablelm", tmp_path))


@pytest.mark.parametrize("head", ["value", "scalar"])
def test_a_new_score_layer_hides_nothing(head: str, tmp_path: Path) -> None:
    """Its scores are 0, whatever the layers below it compute."""
    load(save("llama", tmp_path / "llama"), head=head)
    with pytest.raises(ValueError, match="of the kind 'minimax' computes other numbers"):
        load(save("minimax", tmp_path / "minimax", **CHANGED["minimax"]), head=head)


def test_adapters_and_what_is_frozen_below_them_are_tried_as_they_are(tmp_path: Path) -> None:
    load(save("qwen3", tmp_path), lora=LoraConfig(rank=2, alpha=2.0, dropout=0.5), compute_dtype=torch.bfloat16)


def test_the_trial_leaves_no_trace(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, attention_dropout=0.5)
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    model = load(directory).model
    assert torch.rand(1) == drawn
    assert all(parameter.grad is None for parameter in model.parameters())
    config: Any = model.config
    assert config._attn_implementation == "corral_packed_sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())


def play_rank(world: ParallelContext, directory: Path) -> None:
    """Load a sound model and a changed one in every layout; what is said of them goes into a file."""
    meshes = {
        name: Mesh(ranks=(0, 1), dims=dims)
        for name, dims in {"d2": ParallelDims(dp=2), "t2": ParallelDims(tp=2), "c2": ParallelDims(cp=2)}.items()
    }
    for name, context in mesh_contexts(world, meshes).items():
        assert context is not None
        load(directory / "qwen3", context, compute_dtype=torch.bfloat16)
        load(directory / "qwen3", context, head="value")
        if name == "t2":  # which takes other kinds of layers anyway
            continue
        with pytest.raises(ValueError, match="of the kind 'doge' computes other numbers") as refused:
            load(directory / "doge", context)
        (directory / f"{name}-{world.rank}").write_text(str(refused.value))


def test_all_ranks_of_a_layout_say_the_same(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "qwen3")
    save("doge", tmp_path / "doge", **CHANGED["doge"])
    play(play_rank, tmp_path, world_size=2, directory=tmp_path)
    for layout in ("d2", "c2"):
        first, second = ((tmp_path / f"{layout}-{rank}").read_text() for rank in range(2))
        assert first == second
