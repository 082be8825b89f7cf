"""Router replay for a mixture of experts: the experts that generated a token compute it again in training.

    the generator's rows of a micro-batch ──► RoutedExperts.rows ──┐ by layer
    hidden [T, H] ──► router of a layer ──► its own logits ────────┴──► experts [T, k], their weights of today

A generator and a trainer round differently, and where two experts are nearly equal, another one answers: a jump, where
rounding alone would be a step (rollout routing replay, Ma et al. 2025, https://arxiv.org/abs/2510.11370). Replay says
which experts compute a token. How much each counts comes from the present weights, with gradient, as ever.

Every router finds its rows by its layer, each time that it is asked: so a layer that is computed once more for the
backward pass gets the same experts, whatever has been computed in between.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

_Router: TypeAlias = MixtralTopKRouter | Qwen2MoeTopKRouter | Qwen3MoeTopKRouter
_ROUTED: Final = "routed_experts_of_the_present_row"  # of a model whose routers can be replayed


@dataclass
class RoutedExperts:
    """The recorded experts of the present micro-batch: one object for all routers of a model."""

    rows: Tensor | None = None
    """[T, layers with experts, top_k], see `MicroBatch`. It stays until the backward pass has ended."""


def install_router_replay(model: Any) -> None:
    """Make the routers of a model replayable, if it has any; before the model is cut over ranks."""
    routers = [module for module in model.modules() if isinstance(module, _Router)]
    if not routers:
        return
    routed = RoutedExperts()
    for layer, router in enumerate(routers):
        router.register_forward_hook(partial(_replayed, routed, layer))
    setattr(model, _ROUTED, routed)


def _replayed(
    routed: RoutedExperts, layer: int, router: Any, _: Any, chosen: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """After a router: the recorded experts of each token where there are any, else the router's own choice.

    Args:
        layer: among those with experts, counted from 0.
        chosen: logits [T, E], weights [T, k], experts [T, k] int64.
    """
    if routed.rows is None:
        return chosen
    logits, _, own = chosen
    recorded = routed.rows[:, layer]
    experts = torch.where((recorded >= 0).all(dim=-1, keepdim=True), recorded.long(), own)
    weights = F.softmax(logits, dtype=torch.float32, dim=-1).gather(-1, experts)
    # A Mixtral's weights add up to 1 without being asked to, and stay in float32.
    is_mixtral = isinstance(router, MixtralTopKRouter)
    if is_mixtral or router.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights if is_mixtral else weights.to(logits.dtype), experts


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
            f"samples say which experts to choose, but a {type(model).__name__} has no routers that can replay them"
        )
