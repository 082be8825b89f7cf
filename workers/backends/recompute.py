"""Layers of a model computed again in the backward pass, in place of keeping what they computed.

    none        forward: everything that a gradient needs is kept                    backward: gradients
    selective   forward: results of matrix products and of attention are kept        backward: norms, rotations, gates
                                                                                      again, layer by layer; gradients
    full        forward: the input of each layer is kept                              backward: layers again; gradients

Nearly all work of a layer is in its matrix products and its attention, and less than half of its memory: `selective`
gives up what is cheap to have again. `full` costs one forward pass more, a third of a step. What is computed again is
computed by the same operations from the same numbers, so that gradients are the same to the bit; the exchange between
ranks that share a layer is made again, too, on all of them in the same order.

A layer must find what it found the first time: its arguments are kept, random numbers and the type of products are put
back as they were, and whatever else it reads must still be so when its backward pass comes.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from corral.experiments.config.model import Recompute
from corral.workers.backends.varlen_torch_versions import VARLEN_OPERATION

_KEPT: Final = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        VARLEN_OPERATION,
    }
)
"""Products of activations and weights, and attention in one operation. Batched products are not among them: they are
those of attention in several operations, whose results grow with the square of a sequence's length. Nor are the grouped
products of experts, whose results, several for each token, are most of what the layer of a mixture would keep."""


def recompute_layers(layers: Iterable[nn.Module], how: Recompute) -> None:
    """Let each of these modules compute its inside again when its gradient is due.

    Only its own forward function is: hooks around it, by which FSDP2 gathers weights and sees gradients come, act once.
    """
    if how == "none":
        return
    for layer in layers:
        layer.forward = _recomputed(layer.forward, how)


def _recomputed(forward: Callable[..., Any], how: Recompute) -> Callable[..., Any]:
    options: dict[str, Any] = {}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def compute(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        return checkpoint(partial(forward, **named), *arguments, use_reentrant=False, **options)

    return compute


def _policy(_: SelectiveCheckpointContext, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
