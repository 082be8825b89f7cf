"""The tensors of a transformers module -> the layers that the decoder computes with.

    self_attn.q_proj, .k_proj, .v_proj --> qkv_proj   one product: they have the same inputs
    everything else                    --> as it is

    dense    normed [T, H] --> down(act(gate) * up) ------------------------------------------> added to hidden
    mixture  normed [T, H] --> router --> top k of E experts per token --> each: as dense --> weighted sum, added
                                                 `--> [T, k] for whoever wants to know

The tensors stay the module's, so weights that are copied into it in place are used by the next call. A mixture reads
the weights of those experts only that some token has chosen, one expert after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from corral.workers.engine.linear import LayerTensors, Linear


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
