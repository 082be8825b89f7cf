"""A directory ──► a model with its head and adapters, each rank with its part of it in the layout of its mesh.

load_model ──► add_adapters ──► head ──► cut_layers (t) ──► share_attention (c) ──► shard (d x c) ──► hold_weights
in its files        │                    parts of layers                            rows of what is left  in float32
                    └─ adapters first: FSDP2 would leave the gradients of those that come later
"""

from pathlib import Path
from typing import Any

import torch

from corral.experiments.config.model import LoraConfig
from corral.workers.backends.files.adapters import read_adapter
from corral.workers.backends.fsdp.loading import hold_weights, load_model
from corral.workers.backends.fsdp.tensor_parallel import cut_layers
from corral.workers.backends.heads import Head
from corral.workers.backends.lora import add_adapters, frozen_products, trained
from corral.workers.backends.low_precision import cast_per_use
from corral.workers.backends.packed_attention import share_attention
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.router_replay import install_router_replay
from corral.workers.backends.sharding import TENSOR, device_mesh, shard


def load_over_ranks(
    model_directory: Path,
    head: Head[Any],
    context: ParallelContext,
    lora: LoraConfig | None,
    *,
    seed: int,
    compute_dtype: torch.dtype,
) -> Any:
    """This rank's part of a model.

    Args:
        seed: of the adapters' first values.
        compute_dtype: the type that frozen weights below adapters are held in.

    Raises:
        ValueError: if the layout cannot hold this model, or the directory has not all that the head needs.
    """
    mesh = device_mesh(context) if context.world_size > 1 else None
    model = load_model(model_directory, head)
    if lora is not None:
        add_adapters(model, lora, seed=seed, has_score_layer=head.has_score_layer)
        if lora.adapter is not None:
            read_adapter(lora.adapter, trained(dict(model.named_parameters())))
    cast_per_use(model)
    head.install(model)
    install_router_replay(model)
    if mesh is not None and context.tp_size > 1:
        cut_layers(model, mesh[TENSOR])
    if context.cp_group is not None:
        share_attention(model, context.cp_group)
    if mesh is not None:
        shard(model, mesh)
    model.to(context.device)  # where layers have come as they were cut, and never whole
    hold_weights(model, low=frozen_products(model), low_type=compute_dtype)
    return model
