"""config.json of a model ──► whether a training backend computes it as transformers does.

                          fsdp, d and c    fsdp, t    megatron
llama, qwen2, qwen3            x              x           x       unless its config.json asks for one of the
qwen3_moe                      x                            x     things that Megatron's layers would leave out
every other type               x
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

TENSOR_PARALLEL_MODELS: Final = ("llama", "qwen2", "qwen3")
"""Models whose layers `workers/backends/fsdp/tensor_parallel.py` knows how to cut, by their model_type."""
MEGATRON_MODELS: Final = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Models of which `workers/backends/megatron` computes what transformers does, by their model_type."""

_LEFT_OUT: Final = ("use_sliding_window", "attention_bias", "mlp_bias", "mlp_only_layers")
"""Keys of config.json that ask for what mbridge takes without a word and does not build."""


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
    if (step := config.get("decoder_sparse_step") or 1) != 1:
        yield f"decoder_sparse_step {step}"
