"""Training states carried from every layout of either backend to every other one, by ranks of one trainer group.

each layout: make an engine ──► 2 steps ──► save ──► 2 more: the losses that others should have
each layout, for every other one: read its state into the same engine ──► 2 steps
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from corral.workers.backends.base import AnyEngine
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from tests.workers.backends.layout_scene import NUM_STEPS, SAVED_AFTER, Variant, make_engine, mesh_of, train
from tests.workers.backends.megatron_scene import make_megatron


def play_states(world: ParallelContext, model: Path, layouts: Sequence[str], directory: Path) -> None:
    """What one rank does.

    Args:
        layouts: each with its backend, as in `fsdp:d2`.
    """
    engines: dict[str, AnyEngine] = {}
    losses: dict[str, list[float]] = {}
    for layout, context in mesh_contexts(world, {layout: mesh_of(layout) for layout in layouts}).items():
        if context is not None:
            make = make_engine if layout.startswith("fsdp:") else make_megatron
            engine = engines[layout] = make(model, context, Variant())
            train(engine, range(SAVED_AFTER))
            engine.state_shard().write(directory / layout)
            losses[layout] = _next_losses(engine)
    dist.barrier(group=world.group)  # what one layout has saved, ranks of another one read
    for after, engine in engines.items():
        for before in layouts:
            if before != after:
                engine.load_state(directory / before)
                losses[f"{before}>{after}"] = _next_losses(engine)
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(losses))


def _next_losses(engine: AnyEngine) -> list[float]:
    return [stats["sft/loss"] for stats in train(engine, range(SAVED_AFTER, NUM_STEPS))]
