"""A model's shape is read from its config.json as the model itself is built from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from corral.experiments.inputs.model_directory import transformer_shape
from corral.scheduling.packing import forward_flops

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "vocab_size": 101,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2"} | SIZES,
        {"model_type": "qwen3", "head_dim": 16} | SIZES,
        {"model_type": "llama"} | SIZES | {"num_key_value_heads": 6},
    ],
    ids=lambda config: config["model_type"],
)
def test_the_work_of_a_token_is_two_operations_for_each_weight_of_each_linear_layer(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = transformer_shape(tmp_path)
    assert shape is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    attention = model.model.layers[0].self_attn.q_proj.out_features
    # Of every pair of tokens, the score and the sum of values; half of the pairs are masked.
    assert forward_flops([[10]], [shape])[0] == 10 * 2 * linear + 3 * 4 * attention * (10 * 10 / 2)


@pytest.mark.parametrize("content", ["{}", "[]", "no json", json.dumps(SIZES | {"num_attention_heads": 0})])
def test_a_config_that_does_not_say_the_shape_gives_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert transformer_shape(tmp_path) is None
    assert transformer_shape(tmp_path / "nowhere") is None
