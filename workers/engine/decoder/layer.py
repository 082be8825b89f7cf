"""The tensors of a transformers module -> the layers that the decoder computes with.

    self_attn.q_proj, .k_proj, .v_proj --> qkv_proj   one product: they have the same inputs
    everything else                    --> as it is

The tensors stay the module's, so weights that are copied into it in place are used by the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corral.workers.engine.decoder.linear import LayerTensors, MatrixProduct
from corral.workers.engine.decoder.mlp import DenseMLP, MakeProduct, Mixture
from corral.workers.engine.decoder.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a decoder."""

    input_norm: RMSNorm
    qkv_proj: MatrixProduct
    """Query heads, then key heads, then value heads."""
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o_proj: MatrixProduct
    mlp_norm: RMSNorm
    mlp: DenseMLP | Mixture

    @classmethod
    def of(cls, module: Any, make_product: MakeProduct, config: Any, *, dtype: torch.dtype) -> Layer:
        """Of a layer of a transformers module.

        Args:
            config: of the whole model.
            dtype: of the model, see `layer_tensors`.
        """
        attention = module.self_attn

        def product(*linears: Any) -> MatrixProduct:
            return make_product(*(layer_tensors(linear, dtype) for linear in linears))

        return cls(
            input_norm=norm_of(module.input_layernorm),
            qkv_proj=product(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None,
            k_norm=norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None,
            o_proj=product(attention.o_proj),
            mlp_norm=norm_of(module.post_attention_layernorm),
            mlp=_mlp_of(module.mlp, make_product, config, dtype=dtype),
        )

    @property
    def products(self) -> tuple[MatrixProduct, ...]:
        return (self.qkv_proj, self.o_proj, *self.mlp.products)


def _mlp_of(module: Any, make_product: MakeProduct, config: Any, *, dtype: torch.dtype) -> DenseMLP | Mixture:
    if not hasattr(module, "experts"):
        return DenseMLP.of(module, make_product, lambda linear: layer_tensors(linear, dtype))
    return Mixture.of(module, make_product, lambda parameter: whole(parameter).to(dtype), config)


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
