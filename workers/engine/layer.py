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
import torch.nn.functional as F
from torch import Tensor

from corral.workers.engine.linear import LayerTensors, MatrixProduct
from corral.workers.engine.norm import RMSNorm


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
    gate_proj: MatrixProduct
    up_proj: MatrixProduct
    down_proj: MatrixProduct
    activation: Callable[[Tensor], Tensor]
    """May overwrite its argument."""

    @classmethod
    def of(cls, module: Any, make_product: Callable[..., MatrixProduct], *, dtype: torch.dtype) -> Layer:
        """Of a layer of a transformers module.

        Args:
            make_product: of the tensors of one or several layers (`LayerTensors`).
            dtype: of the model, see `layer_tensors`.
        """
        attention, mlp = module.self_attn, module.mlp

        def product(*linears: Any) -> MatrixProduct:
            return make_product(*(layer_tensors(linear, dtype) for linear in linears))

        return cls(
            input_norm=norm_of(module.input_layernorm),
            qkv_proj=product(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None,
            k_norm=norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None,
            o_proj=product(attention.o_proj),
            mlp_norm=norm_of(module.post_attention_layernorm),
            gate_proj=product(mlp.gate_proj),
            up_proj=product(mlp.up_proj),
            down_proj=product(mlp.down_proj),
            activation=_silu_ if isinstance(mlp.act_fn, torch.nn.SiLU) else mlp.act_fn,
        )

    @property
    def products(self) -> tuple[MatrixProduct, ...]:
        return (self.qkv_proj, self.o_proj, self.gate_proj, self.up_proj, self.down_proj)


def _silu_(inputs: Tensor) -> Tensor:
    return F.silu(inputs, inplace=True)


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
