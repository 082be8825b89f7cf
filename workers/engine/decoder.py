"""A Llama-shaped decoder over the weight tensors of a transformers module, with attention left to the caller.

    token_ids [T] -> embed -> per layer: norm, q/k/v, rotary, attend (caller), o, norm, MLP -> norm -> logits [N, V]

transformers' own forward spends more time in Python (masks, cache objects, keyword arguments) than in arithmetic on
small models, and its batches cannot change between two tokens. This is the same arithmetic over the same tensors, so
weights that are copied into the module in place are used by the next call (once packed, after packing them again).
Shapes: T tokens, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corral.experiments.inputs.decoder_config import EMBEDDED_ENGINE_MODELS
from corral.workers.engine.linear import QUANTIZABLE_DTYPES, Int8Linear, LayerTensors, Linear
from corral.workers.engine.requests import ExpertRows

Quantization = Literal["int8"]

# Types whose frequencies do not depend on the sequence length, so one table serves every request.
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROTARY_TABLE_STEP = 1024


# The tensors of a transformers module -> the layers that the decoder computes with.
#
#     self_attn.q_proj, .k_proj, .v_proj --> qkv_proj   one product: they have the same inputs
#     everything else                    --> as it is
#
#     dense    normed [T, H] --> down(act(gate) * up) ------------------------------------------> added to hidden
#     mixture  normed [T, H] --> router --> top k of E experts per token --> each: as dense --> weighted sum, added
#                                                  `--> [T, k] if the caller asks for them
#
# The tensors stay the module's, so weights that are copied into it in place are used by the next call. A mixture reads
# the weights of those experts only that some token has chosen, one expert after the other.


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Over a weight that somebody else owns and may overwrite in place."""

    weight: Tensor
    """[n]"""
    epsilon: float
    _epsilon: Tensor
    _width: Tensor

    @classmethod
    def of(cls, weight: Tensor, epsilon: float) -> RMSNorm:
        width = weight.new_tensor(weight.shape[0])
        return cls(weight, epsilon, weight.new_tensor(epsilon), width)

    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs [..., n] of the weight's dtype."""
        if inputs.device.type != "cpu" or inputs.dtype != torch.float32:
            return F.rms_norm(inputs, self.weight.shape, self.weight, self.epsilon)
        squares = (inputs * inputs).sum(dim=-1, keepdim=True)
        inverse = torch.addcdiv(self._epsilon, squares, self._width).rsqrt_()  # epsilon + squares / width, in one call
        return (inputs * inverse).mul_(self.weight)


Activation = Callable[[Tensor], Tensor]
"""May overwrite its argument."""
MakeProduct = Callable[..., Linear]
"""Of one or several linear layers of the module, with the same inputs."""


class DenseMLP:
    """One for all tokens."""

    def __init__(self, module: Any, product: MakeProduct) -> None:
        self.products = [product(layer) for layer in (module.gate_proj, module.up_proj, module.down_proj)]
        self._activation = activation_of(module.act_fn)

    def add_to(self, hidden: Tensor, normed: Tensor, chosen: list[Tensor] | None) -> None:
        """hidden [T, H] += what `normed` [T, H] gives; nothing is chosen."""
        gate, up, down = self.products
        down.add_to(hidden, self._activation(gate(normed)).mul_(up(normed)))


class Mixture:
    """Experts of which each token has some, as Qwen3-MoE computes them."""

    def __init__(self, module: Any, make_product: MakeProduct, config: Any, dtype: torch.dtype) -> None:
        """Of a transformers module that has all experts of a layer in one tensor."""
        experts = module.experts
        self._router = whole(module.gate.weight).to(dtype)  # [E, H], not quantised: it would choose other experts
        gate_up, down = (whole(weights).to(dtype) for weights in (experts.gate_up_proj, experts.down_proj))
        self._gate_ups = [make_product((weight, None)) for weight in gate_up]
        self._downs = [make_product((weight, None)) for weight in down]
        self.products = [*self._gate_ups, *self._downs]
        self._activation = activation_of(experts.act_fn)
        self._top_k = int(config.num_experts_per_tok)
        self._normalizes = bool(config.norm_topk_prob)  # whether the weights of a token's experts add up to 1

    def add_to(self, hidden: Tensor, normed: Tensor, chosen: list[Tensor] | None) -> None:
        """hidden [T, H] += what `normed` [T, H] gives.

        Args:
            chosen: the experts of each token are appended, [T, k] int64; None where nobody asks.
        """
        weights, experts = self._route(normed)
        if chosen is not None:
            chosen.append(experts)
        total = torch.zeros_like(hidden)  # rounded apart from `hidden`, as the trainer does it
        for expert in torch.unique(experts).tolist():
            tokens, places = torch.where(experts == expert)
            gate, up = self._gate_ups[expert](normed[tokens]).chunk(2, dim=-1)
            output = self._downs[expert](self._activation(gate).mul_(up))
            total.index_add_(0, tokens, output * weights[tokens, places, None])
        hidden.add_(total)

    def _route(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The weights [T, k] of the experts [T, k] of each token."""
        probabilities = F.softmax(F.linear(normed, self._router), dtype=torch.float32, dim=-1)
        weights, experts = torch.topk(probabilities, self._top_k, dim=-1)
        if self._normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(normed.dtype), experts


_SILUS = ("SiLU", "SiLUActivation")  # torch's, and transformers' of the same formula, which takes seconds to import


def activation_of(function: Any) -> Activation:
    """The module's activation; in place where that is the same."""
    return _silu_ if type(function).__name__ in _SILUS else function


def _silu_(inputs: Tensor) -> Tensor:
    return F.silu(inputs, inplace=True)


class Layer:
    """One layer of a decoder."""

    def __init__(self, module: Any, make_product: MakeProduct, config: Any, *, dtype: torch.dtype) -> None:
        """Of a layer of a transformers module.

        Args:
            make_product: of the tensors of one or several layers (`LayerTensors`) with the same inputs.
            config: of the whole model.
            dtype: of the model, see `layer_tensors`.
        """

        def product(*linears: Any) -> Linear:
            return make_product(*(layer_tensors(linear, dtype) for linear in linears))

        attention, mlp = module.self_attn, module.mlp
        self.input_norm = norm_of(module.input_layernorm)
        self.qkv_proj = product(attention.q_proj, attention.k_proj, attention.v_proj)
        """Query heads, then key heads, then value heads."""
        self.q_norm = norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.o_proj = product(attention.o_proj)
        self.mlp_norm = norm_of(module.post_attention_layernorm)
        has_experts = hasattr(mlp, "experts")
        self.mlp = Mixture(mlp, make_product, config, dtype) if has_experts else DenseMLP(mlp, product)
        self.products = (self.qkv_proj, self.o_proj, *self.mlp.products)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor behind a sharded parameter (a collective: every rank must come here), or the tensor itself."""
    full_tensor: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return full_tensor() if full_tensor is not None else tensor.detach()


def layer_tensors(module: Any, dtype: torch.dtype) -> LayerTensors:
    """Weight and bias; a layer under training by an adapter says what both amount to.

    Args:
        dtype: of the model. A trainer may hold a layer that stays as it is in another type, which is converted.
    """
    merged: Callable[[], Tensor] | None = getattr(module, "merged_weight", None)
    weight = whole(module.weight) if merged is None else merged()
    return weight.to(dtype), None if module.bias is None else whole(module.bias)


def norm_of(module: Any) -> RMSNorm:
    return RMSNorm.of(whole(module.weight), float(module.variance_epsilon))


class UnsupportedModelError(ValueError):
    """The embedded engine cannot run this architecture exactly."""


class Attend(Protocol):
    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """queries [T, H, D], keys and values [T, K, D] -> attention output [T, H * D]."""


def check_supported(config: Any) -> None:
    """Refuse what this decoder would compute wrongly.

    Raises:
        UnsupportedModelError: naming the property of the model that is not supported.
    """
    if config.model_type not in EMBEDDED_ENGINE_MODELS:
        raise UnsupportedModelError(
            f"the embedded engine runs model types {', '.join(EMBEDDED_ENGINE_MODELS)}, not {config.model_type!r}; "
            "choose a model of one of these types"
        )
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise UnsupportedModelError(
            f"the embedded engine runs full attention only, the model has {sorted(layer_types)}"
        )
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in _STATIC_ROPE_TYPES:
        raise UnsupportedModelError(
            f"the embedded engine runs rotary types {', '.join(_STATIC_ROPE_TYPES)}, the model has {rope_type!r}"
        )


class Decoder:
    """The weights of one causal language model, ready for packed forward passes."""

    def __init__(self, model: nn.Module, *, quantization: Quantization | None = None) -> None:
        """
        Args:
            quantization: int8 rounds the matrices of the layers, and wants `pack_weights` before the first pass.

        Raises:
            UnsupportedModelError: naming the property of the model that is not supported.
            ValueError: if weights of the model's dtype cannot be quantised.
        """
        module: Any = model
        config: Any = module.config
        check_supported(config)
        self._embedding = whole(module.model.embed_tokens.weight)
        if quantization is not None and self._embedding.dtype not in QUANTIZABLE_DTYPES:
            raise ValueError(f"weights of dtype {self._embedding.dtype} cannot be quantised; use float32 or bfloat16")
        make_product = Linear if quantization is None else Int8Linear
        self._layers: Sequence[Layer] = [
            Layer(layer, make_product, config, dtype=self.dtype) for layer in module.model.layers
        ]
        self._norm = norm_of(module.model.norm)
        is_tied = module.lm_head.weight is module.model.embed_tokens.weight
        # Not quantised: its rounding would be in every logit as it is, and a tied one is the embedding.
        self._head = Linear((self._embedding, None)) if is_tied else Linear(layer_tensors(module.lm_head, self.dtype))
        attention = module.model.layers[0].self_attn
        self.head_dim = int(attention.head_dim)
        self.softmax_scale = float(attention.scaling)
        self._num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.vocab_size = int(self._embedding.shape[0])
        self.context_length = int(config.max_position_embeddings)
        self._rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = module.model.rotary_emb
        self._rotary_table = self._embedding.new_empty((0, 2, 1, self.head_dim))

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def expert_layers(self) -> list[int]:
        """The layers that are mixtures of experts."""
        return [index for index, layer in enumerate(self._layers) if isinstance(layer.mlp, Mixture)]

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def empty_keys(self) -> Tensor:
        """[0, num_kv_heads, 0, head_dim]: the keys of no rows, whose type and device are the cache's."""
        return self._embedding.new_empty((0, self.num_kv_heads, 0, self.head_dim))

    def pack_weights(self) -> None:
        """Round the weights that are quantised, and make faster copies, where the device has such; again after every
        change of the weights."""
        for layer in self._layers:
            for product in layer.products:
                product.pack()
        self._head.pack()

    def adopt(self, other: Decoder) -> None:
        """Compute with the weights of another decoder of the same model from now on; nothing is copied."""
        self._embedding, self._layers = other._embedding, other._layers
        self._norm, self._head = other._norm, other._head

    def reserve_positions(self, length: int) -> None:
        """Extend the rotary table to positions 0..length-1."""
        if length <= self._rotary_table.shape[0]:
            return
        rounded = -(-length // _ROTARY_TABLE_STEP) * _ROTARY_TABLE_STEP
        positions = torch.arange(rounded, device=self.device).unsqueeze(0)
        cos, sin = self._rotary(self._embedding[:1], positions)
        sign = torch.ones(self.head_dim, device=self.device, dtype=sin.dtype)
        sign[: self.head_dim // 2] = -1  # rotate_half(x) * sin == roll(x, D / 2) * (sign * sin), in half the operations
        self._rotary_table = torch.stack((cos[0], sin[0] * sign), dim=1).unsqueeze(2)

    def hidden_states(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, *, chosen: list[Tensor] | None = None
    ) -> Tensor:
        """[T, hidden] after the last norm. token_ids and positions: [T] int64, positions within `reserve_positions`.

        Args:
            chosen: each layer with experts appends those of each token, [T, k] int64; None where nobody asks.
        """
        cos, signed_sin = self._rotary_table.index_select(0, positions).unbind(1)
        hidden = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            queries_keys, values = self._heads(layer, layer.input_norm(hidden))
            queries_keys = self._rotate(queries_keys, cos, signed_sin)
            queries, keys = queries_keys[:, : self._num_heads], queries_keys[:, self._num_heads :]
            layer.o_proj.add_to(hidden, attend(index, queries, keys, values))
            del queries_keys, queries, keys, values  # before the MLP, which needs more room than all else
            layer.mlp.add_to(hidden, layer.mlp_norm(hidden), chosen)
        return self._norm(hidden)

    def expert_rows(self, chosen: Sequence[Tensor]) -> ExpertRows:
        """What one pass has appended to `chosen`, token by token; 0 in layers without experts."""
        by_layer = torch.stack(tuple(chosen), dim=1).to(torch.int16).cpu().numpy()
        rows = np.zeros((by_layer.shape[0], self.num_layers, by_layer.shape[2]), np.int16)
        rows[:, self.expert_layers] = by_layer
        return rows

    def _heads(self, layer: Layer, normed: Tensor) -> tuple[Tensor, Tensor]:
        """(queries and keys [T, H + K, D], values [T, K, D]) of inputs [T, hidden]."""
        heads = layer.qkv_proj(normed).view(normed.shape[0], -1, self.head_dim)
        queries_keys, values = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
        if layer.q_norm is None or layer.k_norm is None:
            return queries_keys, values
        queries, keys = queries_keys[:, : self._num_heads], queries_keys[:, self._num_heads :]
        return torch.cat((layer.q_norm(queries), layer.k_norm(keys)), dim=1), values

    def _rotate(self, heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        return (heads * cos).addcmul_(heads.roll(self.head_dim // 2, dims=-1), signed_sin)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 from hidden [N, hidden]."""
        return self._head(hidden).float()
