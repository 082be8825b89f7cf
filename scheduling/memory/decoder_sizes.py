"""The numbers of a config.json -> the tensors of the model in memory, before there are any weights.

    DecoderSizes ──tensor_shapes──► {"model.layers.0.self_attn.q_proj.weight": (4096, 2048), ...}

Names and shapes are those of transformers' modules: experts of a layer are two stacked tensors there, though a stored
model has three matrices for each of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from corral.scheduling.packing import TransformerShape

Output = Literal["vocabulary", "score"]
"""What a model's last layer gives for a token: logits, or one number."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes(TransformerShape):
    """A decoder as transformers' Llama, Mistral, Qwen2, Qwen3 and their mixtures are: how large everything is."""

    is_tied: bool = False
    """Whether the output's weight is the embedding's."""
    has_query_biases: bool = False
    """Whether queries, keys and values have biases."""
    has_attention_output_bias: bool = False
    has_mlp_biases: bool = False
    has_head_norms: bool = False
    """Whether queries and keys are normalized, head by head."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    """What `intermediate_size` is in one expert."""
    shared_expert_size: int = 0
    """The same in the expert that every token goes to, beside those that are chosen; 0 if there is none."""
    sparse_layers: frozenset[int] = frozenset()
    """Layers with experts in place of one MLP."""

    @property
    def layer_kinds(self) -> list[int]:
        """A layer without experts and one with them, as far as there are both."""
        dense = next((layer for layer in range(self.num_layers) if layer not in self.sparse_layers), None)
        return [layer for layer in (dense, min(self.sparse_layers, default=None)) if layer is not None]


def num_parameters(sizes: DecoderSizes, output: Output = "vocabulary") -> int:
    """How many numbers the model has; a weight that is used twice counts once."""
    return sum(math.prod(shape) for shape in tensor_shapes(sizes, output).values())


def tensor_shapes(sizes: DecoderSizes, output: Output = "vocabulary") -> dict[str, Shape]:
    """The shape of every parameter, by its name."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (sizes.vocab_size, sizes.hidden_size)}
    for layer in range(sizes.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(sizes, layer)}
    shapes["model.norm.weight"] = (sizes.hidden_size,)
    if output == "score":
        shapes["score.weight"] = (1, sizes.hidden_size)
    elif not sizes.is_tied:
        shapes["lm_head.weight"] = (sizes.vocab_size, sizes.hidden_size)
    return shapes


def _layer(sizes: DecoderSizes, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, query, key_value = sizes.hidden_size, sizes.query_size, sizes.key_value_size
    attention = {"q_proj": (query, hidden), "k_proj": (key_value, hidden), "v_proj": (key_value, hidden)}
    for name, shape in attention.items():
        yield from _linear(f"self_attn.{name}", shape, has_bias=sizes.has_query_biases)
    yield from _linear("self_attn.o_proj", (hidden, query), has_bias=sizes.has_attention_output_bias)
    if sizes.has_head_norms:
        yield "self_attn.q_norm.weight", (sizes.head_dim,)
        yield "self_attn.k_norm.weight", (sizes.head_dim,)
    if layer in sizes.sparse_layers:
        yield "mlp.experts.gate_up_proj", (sizes.num_experts, 2 * sizes.expert_size, hidden)
        yield "mlp.experts.down_proj", (sizes.num_experts, hidden, sizes.expert_size)
        yield "mlp.gate.weight", (sizes.num_experts, hidden)
        if sizes.shared_expert_size:
            for name in ("gate_proj", "up_proj"):
                yield f"mlp.shared_expert.{name}.weight", (sizes.shared_expert_size, hidden)
            yield "mlp.shared_expert.down_proj.weight", (hidden, sizes.shared_expert_size)
            yield "mlp.shared_expert_gate.weight", (1, hidden)
    else:
        for name in ("gate_proj", "up_proj"):
            yield from _linear(f"mlp.{name}", (sizes.intermediate_size, hidden), has_bias=sizes.has_mlp_biases)
        yield from _linear("mlp.down_proj", (hidden, sizes.intermediate_size), has_bias=sizes.has_mlp_biases)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _linear(name: str, shape: Shape, *, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if has_bias:
        yield f"{name}.bias", shape[:1]
