"""Experts of a transformers mixture, computed in the type of the other products, all of a layer in one call.

    hidden [T, H] ──► k rows of each token, sorted by expert ──► gate and up: one call ──► act(gate) * up
    [T, H] ◄── added up ◄── times how much each counts, in the tokens' order ◄── down: one call ◄──┘

transformers' own `grouped_mm` computes in the type of the weights, which are float32 master weights here: autocast does
not reach it, and on a GPU torch multiplies float32 groups one by one, with a wait of the host for each layer.
"""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from corral.workers.backends.grouped_product import grouped_product

GROUPED_EXPERTS: Final = "corral_grouped"
"""What `experts_implementation` names them by."""


def register_grouped_experts() -> None:
    """Make them known to transformers; again changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(GROUPED_EXPERTS, _compute)


def _compute(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' interface: hidden [T, H], experts [T, k], how much each counts [T, k] -> [T, H]."""
    if not module.has_gate or module.has_bias or module.is_transposed or module.has_post_expert_norm:
        output: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return output
    kind = hidden_states.device.type
    weight: Tensor = module.gate_up_proj
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    chosen, order = torch.sort(top_k_index.flatten(), stable=True)
    # On the device, where `chosen` is: the host need not wait for how many tokens an expert has.
    ends = torch.searchsorted(chosen, torch.arange(module.num_experts, device=chosen.device), right=True).int()
    tokens = hidden_states[order // top_k_index.shape[1]]
    gated = module._apply_gate(grouped_product(tokens, ends, [weight], dtype=dtype))
    outputs = grouped_product(gated, ends, [module.down_proj], dtype=dtype)
    weighted = outputs * top_k_weights.flatten()[order, None]
    in_order = weighted[torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))]
    return in_order.view(*top_k_index.shape, -1).sum(dim=1, dtype=hidden_states.dtype)


def expert_matrices(layers: Iterable[nn.Module]) -> dict[nn.Parameter, int]:
    """The parameters of experts in these layers, and how many matrices of each expert one of them has.

    gate_up_proj [E, 2 I, H] has two, for what reads matrices one by one; a bias [E, I] has none.
    """
    found: dict[nn.Parameter, int] = {}
    for module in (module for layer in layers for module in layer.modules() if hasattr(module, "is_concatenated")):
        for name, parameter in module.named_parameters(recurse=False):
            are_two = name == "gate_up_proj" and module.is_concatenated and not module.is_transposed
            found[parameter] = 0 if parameter.ndim < 3 else 2 if are_two else 1
    return found
