"""config.json of a model ──► whether a training backend computes it as transformers does, and what generates with it.

                      fsdp, d and c    fsdp, t    megatron    embedded engine
llama, qwen2, qwen3         x             x          x              x           megatron: unless its config.json asks
qwen3_moe                   x                        x              x           for one of the things that Megatron's
mixtral, qwen2_moe          x                        x                          layers would leave out
every other type            x
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

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
