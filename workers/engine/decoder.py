"""A Llama-shaped decoder over the weight tensors of a transformers module, with attention left to the caller.

    token_ids [T] -> embed -> per layer: norm, q/k/v, rotary, attend (caller), o, norm, MLP -> norm -> logits [N, V]

transformers' own forward spends more time in Python (masks, cache objects, keyword arguments) than in arithmetic on
small models, and its batches cannot change between two tokens. This is the same arithmetic over the same tensors, so
weights that are copied into the module in place are used by the next call (once packed, after packing them again).
Shapes: T tokens, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corral.experiments.inputs.decoder_config import EMBEDDED_ENGINE_MODELS
from corral.workers.engine.layer import Layer, Mixture, layer_tensors, norm_of, whole
from corral.workers.engine.linear import QUANTIZABLE_DTYPES, Int8Linear, Linear
from corral.workers.engine.requests import ExpertRows

Quantization = Literal["int8"]

# Types whose frequencies do not depend on the sequence length, so one table serves every request.
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROTARY_TABLE_STEP = 1024


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
