"""What the megatron backend is not given, read from config.json before anything is loaded."""

from typing import Any

import pytest

from corral.experiments.inputs.decoder_config import MEGATRON_MODELS, megatron_refusals


@pytest.mark.parametrize("kind", MEGATRON_MODELS)
@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)
def test_plain_models_are_computed_whichever_version_wrote_their_config(kind: str, rope: dict[str, Any]) -> None:
    plain = {"model_type": kind, "use_sliding_window": False, "attention_bias": False}
    assert list(megatron_refusals(plain | rope)) == []


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' (known are"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary positions of type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary positions of type 'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": None}, "rotary positions of type 'yarn'"),
        ({"rope_scaling": "linear"}, "rotary positions of type 'linear'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "mixtral", "sliding_window": 4096}, "sliding_window 4096"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "one expert for each token that always counts 1"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": True}, "one expert for each token"),
    ],
)
def test_what_would_be_computed_otherwise_is_named(change: dict[str, Any], refused: str) -> None:
    [found] = megatron_refusals({"model_type": "qwen3"} | change)
    assert found.startswith(refused)


def test_everything_is_named_at_once() -> None:
    config = {"model_type": "new", "rope_scaling": {"type": "dynamic"}, "mlp_bias": True}
    assert len(list(megatron_refusals(config))) == 3
