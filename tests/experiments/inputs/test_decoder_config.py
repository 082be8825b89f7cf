"""The parameters that a config.json promises, beside those of the model that transformers makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from corral.experiments.inputs.decoder_config import decoder_sizes
from corral.scheduling.memory.decoder_sizes import num_parameters, tensor_shapes

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TINY | {"model_type": "llama", "head_dim": 8},
    "llama with biases": TINY | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama with tied weights": TINY | {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": TINY | {"model_type": "mistral", "head_dim": 16},
    "mixtral": TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": TINY | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": TINY | {"model_type": "qwen3", "head_dim": 16},
    "qwen3 without a head size": TINY | {"model_type": "qwen3"},
    "qwen3 with biases": TINY | {"model_type": "qwen3", "attention_bias": True},
    "qwen3 mixture": TINY | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 16},
    "mixture in some layers": TINY | EXPERTS | {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
    "mixture but for one layer": TINY | EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [1]},
    "mixture with a shared expert": TINY | EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40},
    "shared expert and no biases": TINY
    | EXPERTS
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40, "qkv_bias": False, "mlp_only_layers": [0]},
    "Qwen3-32B": QWEN3_32B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
}


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_names_and_shapes_are_those_of_the_model(config: dict[str, Any], tmp_path: Path) -> None:
    sizes = decoder_sizes(write_config(tmp_path / "model", config))
    assert sizes is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model", local_files_only=True))
    assert tensor_shapes(sizes) == shapes_of(model)
    assert num_parameters(sizes) == model.num_parameters()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_score_layer_takes_the_place_of_the_output(name: str, tmp_path: Path) -> None:
    sizes = decoder_sizes(write_config(tmp_path / "model", CONFIGS[name]))
    assert sizes is not None
    config: Any = AutoConfig.from_pretrained(tmp_path / "model", local_files_only=True)
    config.num_labels, config.token_classification_bias = 1, False
    with torch.device("meta"):
        shapes = shapes_of(AutoModelForTokenClassification.from_config(config))
    shapes.pop("score.bias", None)  # the engine's score layer has none
    assert tensor_shapes(sizes, "score") == shapes


@pytest.mark.parametrize(
    "config",
    [
        TINY | {"model_type": "gpt2"},
        TINY,
        TINY | {"model_type": "llama", "hidden_size": 0},
        TINY | {"model_type": "llama", "vocab_size": "50"},
        {"model_type": "llama"},
        TINY | {"model_type": "qwen3_moe"},
        TINY | EXPERTS | {"model_type": "qwen2_moe"},
    ],
    ids=str,
)
def test_nothing_is_promised_of_what_is_not_known(config: dict[str, Any], tmp_path: Path) -> None:
    assert decoder_sizes(write_config(tmp_path, config)) is None
    assert decoder_sizes(tmp_path / "nowhere") is None
