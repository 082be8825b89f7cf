"""The MLP of a layer, dense or a mixture of experts, over the tensors of a transformers module.

    dense    normed [T, H] ──► down(act(gate) * up) ──────────────────────────────────────────► added to hidden
    mixture  normed [T, H] ──► router ──► top k of E experts per token ──► each: as dense ──► weighted sum, added
                                                 └──► [T, k] for whoever wants to know

A mixture reads the weights of those experts only that some token has chosen, one expert after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from corral.workers.engine.decoder.linear import LayerTensors, MatrixProduct

Activation = Callable[[Tensor], Tensor]
"""May overwrite its argument."""
MakeProduct = Callable[..., MatrixProduct]
"""Of the tensors of one or several layers (`LayerTensors`) with the same inputs."""
ReadTensors = Callable[[Any], LayerTensors]
"""Of a linear layer of the module."""
ReadWhole = Callable[[Tensor], Tensor]
"""Of a parameter of the module, in the dtype of the model."""


@dataclass(frozen=True, slots=True)
class DenseMLP:
    """One for all tokens."""

    gate_proj: MatrixProduct
    up_proj: MatrixProduct
    down_proj: MatrixProduct
    activation: Activation

    @classmethod
    def of(cls, module: Any, make_product: MakeProduct, read: ReadTensors) -> DenseMLP:
        gate, up, down = (make_product(read(layer)) for layer in (module.gate_proj, module.up_proj, module.down_proj))
        return cls(gate, up, down, activation_of(module.act_fn))

    @property
    def products(self) -> Sequence[MatrixProduct]:
        return (self.gate_proj, self.up_proj, self.down_proj)

    def add_to(self, hidden: Tensor, normed: Tensor, chosen: list[Tensor] | None) -> None:
        """hidden [T, H] += what `normed` [T, H] gives; nothing is chosen."""
        gated = self.activation(self.gate_proj(normed)).mul_(self.up_proj(normed))
        self.down_proj.add_to(hidden, gated)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of which each token has some, as Qwen3-MoE computes them."""

    router: Tensor
    """[E, H]. It is not quantised: rounded, it would choose other experts."""
    gate_up_projs: Sequence[MatrixProduct]
    """By expert; gate, then up."""
    down_projs: Sequence[MatrixProduct]
    activation: Activation
    top_k: int
    normalizes: bool
    """Whether the weights of a token's experts add up to 1."""

    @classmethod
    def of(cls, module: Any, make_product: MakeProduct, whole: ReadWhole, config: Any) -> Mixture:
        """Of a transformers module that has all experts of a layer in one tensor."""
        experts = module.experts
        return cls(
            router=whole(module.gate.weight),
            gate_up_projs=[make_product((weight, None)) for weight in whole(experts.gate_up_proj)],
            down_projs=[make_product((weight, None)) for weight in whole(experts.down_proj)],
            activation=activation_of(experts.act_fn),
            top_k=int(config.num_experts_per_tok),
            normalizes=bool(config.norm_topk_prob),
        )

    @property
    def products(self) -> Sequence[MatrixProduct]:
        return (*self.gate_up_projs, *self.down_projs)

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
            gate, up = self.gate_up_projs[expert](normed[tokens]).chunk(2, dim=-1)
            output = self.down_projs[expert](self.activation(gate).mul_(up))
            total.index_add_(0, tokens, output * weights[tokens, places, None])
        hidden.add_(total)

    def _route(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The weights [T, k] of the experts [T, k] of each token."""
        probabilities = F.softmax(F.linear(normed, self.router), dtype=torch.float32, dim=-1)
        weights, experts = torch.topk(probabilities, self.top_k, dim=-1)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(normed.dtype), experts


def activation_of(function: Any) -> Activation:
    """The module's activation; in place where that is the same."""
    return _silu_ if isinstance(function, torch.nn.SiLU) else function


def _silu_(inputs: Tensor) -> Tensor:
    return F.silu(inputs, inplace=True)
