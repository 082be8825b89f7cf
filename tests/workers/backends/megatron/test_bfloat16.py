"""In bfloat16 every layout of megatron-core learns what a float32 loop does, as far as 8 bits of a number can say.

A number in bfloat16 is off by up to 2^-9 of itself. Losses are means over many products, whose errors are of either
sign, and are off by less than four times as much. AdamW moves a weight by nearly the learning rate whichever gradient
it has, so that one which is nearly zero, and rounded to the other side of it, moves the other way: of what all weights
have moved in `NUM_STEPS` steps a part is different (6 % here, 9 % with experts), and the rest is not.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from corral.experiments.config.model import Recompute
from corral.workers.backends.files.weights import as_stored
from corral.workers.backends.megatron.engine import MegatronEngine
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.layout_scene import NUM_STEPS, Variant, mesh_of, plain_loop, play_layouts, save_tiny
from tests.workers.backends.megatron.experts_scene import save_tiny_mixture
from tests.workers.backends.megatron_scene import make_megatron
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import read_weights

LOSS_TOLERANCE = 4 * 2**-9
MOVED_OTHERWISE = 0.15
"""Of the distance that all weights have moved, in the Euclidean norm."""


def make_bfloat16(model: Path, context: ParallelContext, variant: Variant) -> MegatronEngine:
    return make_megatron(model, context, replace(variant, dtype=torch.bfloat16))


def train_in_layouts(world: ParallelContext, model: Path, layouts: Mapping[str, Recompute], directory: Path) -> None:
    play_layouts(world, [model], layouts, (), directory, make_bfloat16)
    dist.barrier(group=world.group)  # rank 0 has the store, which engines of others ask


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "mixture"])
def test_a_layout_learns_nearly_what_a_float32_loop_does(kind: str, tmp_path: Path) -> None:
    layouts: Mapping[str, Recompute] = {"t2": "none", "d2": "selective", "c2": "none", "p2": "full"}
    if kind == "mixture":
        model, layouts = save_tiny_mixture("qwen3_moe", tmp_path / kind), {"d2e2": "none"}
    else:
        model = save_tiny(kind, tmp_path / kind)
    before = read_weights(model)
    out = tmp_path / "out"
    out.mkdir()
    play(train_in_layouts, model, layouts, out, world_size=4, directory=tmp_path)
    trained, expected = plain_loop(model)
    after = dict(as_stored(trained, trained.named_parameters(), dtype=torch.float32))
    for layout in layouts:
        for stats in stats_by_rank(out, kind, layout):
            for step in range(NUM_STEPS):
                assert stats[step]["sft/loss"] == pytest.approx(expected[step]["sft/loss"], rel=LOSS_TOLERANCE)
        saved = read_weights(out / kind / layout / "weights")
        assert saved.keys() == after.keys() and {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
        assert distance(saved, after) < MOVED_OTHERWISE * distance(after, before), layout


def stats_by_rank(directory: Path, kind: str, layout: str) -> list[list[dict[str, float]]]:
    ranks = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in mesh_of(layout).ranks]
    return [rank[f"{kind} {layout}"]["stats"] for rank in ranks]


def distance(some: Mapping[str, Tensor], others: Mapping[str, Any]) -> float:
    return float(torch.stack([(some[name].float() - others[name].float()).norm() for name in some]).detach().norm())
