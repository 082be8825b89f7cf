"""A directory ──► a model with its head and adapters, each rank with its part of it in the layout of its mesh.

load_model ──► add_adapters ──► head ──► cut_layers (t) ──► share_attention (c) ──► shard (d x c) ──► hold_weights
in its files        │                    parts of layers                            rows of what is left  in float32
                    └─ adapters first: FSDP2 would leave the gradients of those that come later
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from corral.experiments.config.model import LoraConfig
from corral.workers.backends.files.adapters import read_adapter
from corral.workers.backends.fsdp.expert_files import StoredExperts
from corral.workers.backends.fsdp.experts import expert_matrices
from corral.workers.backends.fsdp.loading import hold_weights, load_model
from corral.workers.backends.fsdp.tensor_parallel import cut_layers
from corral.workers.backends.heads import Head
from corral.workers.backends.lora import add_adapters, frozen_products, trained
from corral.workers.backends.low_precision import cast_per_use
from corral.workers.backends.packed_attention import share_attention
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.router_replay import install_router_replay
from corral.workers.backends.sharding import TENSOR, device_mesh, layers_of, shard


def load_over_ranks(
    model_directory: Path,
    head: Head[Any],
    context: ParallelContext,
    lora: LoraConfig | None,
    *,
    seed: int,
    compute_dtype: torch.dtype,
    is_held_low: bool = False,
) -> Any:
    """This rank's part of a model.

    Args:
        seed: of the adapters' first values.
        compute_dtype: of the products: what frozen weights below adapters are held in, and layers gathered in.
        is_held_low: whether all weights that products alone read are frozen, and held so.

    Raises:
        ValueError: if the layout cannot hold this model, or the directory has not all that the head needs.
    """
    mesh = device_mesh(context) if context.world_size > 1 else None
    with ExitStack() as stack:
        stored = StoredExperts(model_directory, stack)
        model = load_model(model_directory, head, stored)
        if is_held_low:
            model.requires_grad_(False)
        _prepare(model, head, lora, seed=seed)
        _cut(model, context, mesh, compute_dtype=compute_dtype)
        # Where layers come as they were cut, and never whole.
        experts = [weight for weight, number in expert_matrices(layers_of(model)).items() if number]
        low = [*frozen_products(model), *(weight for weight in experts if not weight.requires_grad)]
        hold_weights(model, context.device, stored, low=low, low_type=compute_dtype)
    return model


def _prepare(model: Any, head: Head[Any], lora: LoraConfig | None, *, seed: int) -> None:
    """Whatever is done with a whole model."""
    if lora is not None:
        add_adapters(model, lora, seed=seed, has_score_layer=head.has_score_layer)
        if lora.adapter is not None:
            read_adapter(lora.adapter, trained(dict(model.named_parameters())))
    cast_per_use(model)
    head.install(model)
    install_router_replay(model)


def _cut(model: Any, context: ParallelContext, mesh: DeviceMesh | None, *, compute_dtype: torch.dtype) -> None:
    if mesh is not None and context.tp_size > 1:
        cut_layers(model, mesh[TENSOR])
    if context.cp_group is not None:
        share_attention(model, context.cp_group)
    if mesh is not None:
        shard(model, mesh, compute_dtype=compute_dtype)
