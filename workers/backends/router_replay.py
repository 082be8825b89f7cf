"""Routers of a mixture of experts that can be told whom to choose: the experts that made a token compute it again.

    the generator's rows of a micro-batch ──► RoutedExperts.rows ──┐ by layer
    hidden [T, H] ──► ReplayingRouter of a layer: its own logits ──┴──► experts [T, k], their weights of today

A generator and a trainer round differently, and where two experts are nearly equal, another one answers: a jump, where
rounding alone would be a step (rollout routing replay, Ma et al. 2025, https://arxiv.org/abs/2510.11370). Replay says
which experts compute a token. How much each counts comes from the present weights, with gradient, as ever.

Every router finds its rows by its layer, each time that it is asked: so a layer that is computed once more for the
backward pass gets the same experts, whatever has been computed in between.
"""

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

_Router: TypeAlias = MixtralTopKRouter | Qwen2MoeTopKRouter | Qwen3MoeTopKRouter
_ROUTED: Final = "routed_experts_of_the_present_row"  # of a model whose routers can be told


@dataclass
class RoutedExperts:
    """Who computes the tokens of the micro-batch that a model has at present: one for all routers of a model."""

    rows: Tensor | None = None
    """[T, layers with experts, top_k], see `MicroBatch`. It stays until the backward pass has ended."""


class ReplayingRouter(nn.Module):
    """Chooses as the router that it replaces, whose weight it has, but where it is told whom to choose."""

    def __init__(self, router: _Router, routed: RoutedExperts, *, layer: int) -> None:
        """
        Args:
            layer: among those with experts, counted from 0.
        """
        super().__init__()
        self.weight: nn.Parameter = router.weight
        self._top_k = int(router.top_k)
        # A Mixtral's weights add up to 1 without being asked to, and stay in float32.
        self._is_mixtral = isinstance(router, MixtralTopKRouter)
        self._normalizes = self._is_mixtral or bool(router.norm_topk_prob)
        self._routed = routed
        self._layer = layer

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [..., H] of T tokens -> (logits [T, E], weights [T, k], experts [T, k] int64)."""
        logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        probabilities = F.softmax(logits, dtype=torch.float32, dim=-1)
        experts = torch.topk(probabilities, self._top_k, dim=-1).indices
        if (rows := self._routed.rows) is not None:
            told = rows[:, self._layer]
            is_told = (told >= 0).all(dim=-1, keepdim=True)
            experts = torch.where(is_told, told.long(), experts)
        weights = probabilities.gather(-1, experts)
        if self._normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights if self._is_mixtral else weights.to(logits.dtype), experts


def install_router_replay(model: Any) -> None:
    """Give a model routers that can be told whom to choose, if it has any; before it is cut over ranks."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, _Router)]
    if not found:
        return
    routed = RoutedExperts()
    for layer, (name, router) in enumerate(found):
        model.set_submodule(name, ReplayingRouter(router, routed, layer=layer))
    setattr(model, _ROUTED, routed)


def tell_routers(model: Any, rows: Tensor | None) -> None:
    """Whom to choose in the next forward pass of a model, and in the backward pass after it.

    Args:
        rows: see `MicroBatch.routed_experts`; None lets the routers choose.

    Raises:
        ValueError: if nobody listens.
    """
    routed: RoutedExperts | None = getattr(model, _ROUTED, None)
    if routed is not None:
        routed.rows = rows
    elif rows is not None:
        raise ValueError(
            f"samples say which experts to choose, and a {type(model).__name__} has no routers that could be told; set "
            "ppo.router_replay to false"
        )
