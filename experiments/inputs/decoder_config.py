"""config.json ──► the sizes of its decoder, for the model types whose modules are known here; None for all others."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from corral.experiments.inputs.model_directory import read_config, transformer_shape
from corral.scheduling.memory.decoder_sizes import DecoderSizes

_QWEN3_HEAD_DIM = 128  # of transformers' Qwen3Config, where config.json leaves it out


# config.json of a model ──► whether a training backend computes it as transformers does, and what generates with it.
#
#                       fsdp, d and c    fsdp, t    megatron    embedded engine
# llama, qwen2, qwen3         x             x          x              x           megatron: unless its config.json asks
# qwen3_moe                   x                        x              x           for one of the things that Megatron's
# mixtral, qwen2_moe          x                        x                          layers would leave out
# every other type            x

EMBEDDED_ENGINE_MODELS: Final = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Models whose layers the embedded engine computes, by their model_type (workers/engine/decoder)."""
TENSOR_PARALLEL_MODELS: Final = ("llama", "qwen2", "qwen3")
"""Models whose layers `workers/backends/fsdp/tensor_parallel.py` knows how to cut, by their model_type."""
MIXTURES: Final = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Mixtures of experts that training knows how to lay out, and whose routers it can tell whom to choose."""
MEGATRON_MODELS: Final = ("llama", "qwen2", "qwen3", *MIXTURES)
"""Models of which `workers/backends/megatron` computes what transformers does, by their model_type."""

_NUMBERS_OF_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_LEFT_OUT: Final = ("use_sliding_window", "attention_bias", "mlp_bias")
"""Keys of config.json that ask for what mbridge takes without a word and does not build."""


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a mixture of experts, of whatever kind."""
    return any(config.get(key) for key in _NUMBERS_OF_EXPERTS)


def megatron_refusals(config: Mapping[str, Any]) -> Iterator[str]:
    """What of a config.json the megatron backend would compute otherwise than transformers, each as a noun phrase.

    Args:
        config: the file's content, or what transformers makes of it.
    """
    kind = config.get("model_type")
    if kind not in MEGATRON_MODELS:
        yield f"model_type {kind!r} (known are {', '.join(MEGATRON_MODELS)})"
    # Older files call it rope_scaling, and older ones than these its rope_type just type.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else rope
    if rope_type != "default":
        yield f"rotary positions of type {rope_type!r}"
    yield from (key for key in _LEFT_OUT if config.get(key))
    if (activation := config.get("hidden_act") or "silu") != "silu":
        yield f"hidden_act {activation!r} (Megatron's layers are built with silu)"
    if kind in MIXTURES:
        yield from _mixture_refusals(config)


def _mixture_refusals(config: Mapping[str, Any]) -> Iterator[str]:
    is_mixtral = config.get("model_type") == "mixtral"
    if is_mixtral and (window := config.get("sliding_window")) is not None:
        yield f"sliding_window {window}"  # of the others, use_sliding_window says whether it counts
    if is_mixtral and config.get("router_jitter_noise"):
        yield "router_jitter_noise"
    if config.get("num_experts_per_tok") == 1 and (is_mixtral or config.get("norm_topk_prob")):
        yield "one expert for each token that always counts 1 (num_experts_per_tok), which Megatron's router refuses"


def decoder_sizes(directory: Path) -> DecoderSizes | None:
    """The sizes of the model in a directory; None if its config.json does not say them, or is of another type."""
    config = read_config(directory) or {}
    traits, shape = _TRAITS.get(config.get("model_type", "")), transformer_shape(directory)
    if traits is None or shape is None:
        return None
    is_tied = config.get("tie_word_embeddings") is True
    try:
        return DecoderSizes(**(asdict(shape) | {"is_tied": is_tied} | traits(config)))
    except (KeyError, TypeError, ValueError):
        return None  # submission says elsewhere what is wrong with the numbers


def _biases(config: Mapping[str, Any]) -> dict[str, Any]:
    has_biases = config.get("attention_bias") is True
    return {"has_query_biases": has_biases, "has_attention_output_bias": has_biases}


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    return _biases(config) | {"has_mlp_biases": config.get("mlp_bias") is True}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = _positive(config.get("head_dim") or _QWEN3_HEAD_DIM)
    return _biases(config) | {"has_head_norms": True, "head_dim": head_dim}


def _qwen2_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    return _mixture(config, expert_size=config["moe_intermediate_size"]) | {
        "has_query_biases": config.get("qkv_bias", True) is True,
        "shared_expert_size": _positive(config["shared_expert_intermediate_size"]),
    }


def _qwen3_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    mixture = _mixture(config, expert_size=config["moe_intermediate_size"])
    return _biases(config) | {"has_head_norms": True} | mixture


def _mixture(config: Mapping[str, Any], *, expert_size: Any) -> dict[str, Any]:
    return {
        "num_experts": _positive(config.get("num_experts") or config["num_local_experts"]),
        "experts_per_token": _positive(config["num_experts_per_tok"]),
        "expert_size": _positive(expert_size),
        "sparse_layers": sparse_layers(config),
    }


def sparse_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """The layers of a mixture that have experts, from 0.

    Args:
        config: the content of its config.json, or what transformers makes of it.
    """
    step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    layers = range(_positive(config["num_hidden_layers"]))
    return frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


_TRAITS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": lambda config: {},
        "mixtral": lambda config: _mixture(config, expert_size=config["intermediate_size"]),
        "qwen2": lambda config: {"has_query_biases": True},
        "qwen2_moe": _qwen2_moe,
        "qwen3": _qwen3,
        "qwen3_moe": _qwen3_moe,
    }
)
"""What distinguishes a type's layers, by `model_type`."""


def _positive(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no size")
    return value
