"""What a rank of Megatron keeps of a state is a part of the model, and any layout of either backend goes on from it."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corral.experiments.config.model import Recompute
from corral.workers.backends.files.weights import as_stored
from corral.workers.backends.megatron.engine import MegatronEngine
from corral.workers.backends.megatron.state import Stretch, boxes
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.layout_scene import NUM_STEPS, Variant, mesh_of, plain_loop, play_layouts, save_tiny
from tests.workers.backends.megatron.experts_scene import KINDS, save_tiny_mixture
from tests.workers.backends.megatron.states_scene import play_states
from tests.workers.backends.megatron_scene import make_megatron
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import read_weights

FSDP = ("d1", "d2", "t2", "c2", "d2t2", "d2c2", "t2c2")
MEGATRON = ("d1", "d2", "t2", "p2", "d2t2", "d2p2", "t2p2", "d2t2p2")
MIXTURE = ("fsdp:d1", "fsdp:d2c2", "megatron:t2", "megatron:d2e2", "megatron:d2p2e2", "megatron:t2c2e2")
ALL = (*(f"fsdp:{layout}" for layout in FSDP), *(f"megatron:{layout}" for layout in MEGATRON))


@st.composite
def fused_rows(draw: st.DrawFn) -> tuple[list[Stretch], dict[str, torch.Tensor], torch.Tensor]:
    """Stretches of a fused parameter, the tensors that they are of, and its rows: some vector, matrix or experts'."""
    width = draw(st.sampled_from([None, 1, 3, 4]))
    lead = draw(st.sampled_from([(), (2,)])) if width is not None else ()
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    columns = draw(st.integers(0, 2)) if width is not None else 0
    row_shape = () if width is None else (columns + width,)
    names = [f"tensor{number % 2}" for number in range(len(counts))]
    tensors = {
        name: torch.arange(1000 * number, 1000 * number + math.prod((*lead, 20, *row_shape))).view(
            *lead, 20, *row_shape
        )
        for number, name in enumerate(dict.fromkeys(names))
    }
    stretches, rows = [], []
    for number, (name, count) in enumerate(zip(names, counts, strict=True)):
        start = (*(size - 1 for size in lead), 5 * number, *((columns,) if width is not None else ()))
        stretches.append(Stretch(sum(counts[:number]), count, name, start))
        place = tuple(slice(at, at + size) for at, size in zip(start, (*(1 for _ in lead), count), strict=False))
        rows.append(
            tensors[name][place][..., columns:].reshape(count, -1) if width is not None else tensors[name][place]
        )
    return stretches, tensors, torch.cat(rows)


@given(fused_rows(), st.data())
def test_a_share_that_begins_and_ends_anywhere_is_boxes_of_the_model(
    fused: tuple[list[Stretch], dict[str, torch.Tensor], torch.Tensor], data: st.DataObject
) -> None:
    stretches, tensors, rows = fused
    start = data.draw(st.integers(0, rows.numel() - 1))
    length = data.draw(st.integers(1, rows.numel() - start))
    share = rows.flatten()[start : start + length]
    found = list(boxes(stretches, None if rows.ndim == 1 else rows.shape[1], start, length))
    assert sum(math.prod(box.shape) for box in found) == length
    assert len(found) <= 3 * len(stretches)
    at = 0
    for box in found:
        size = math.prod(box.shape)
        place = tuple(slice(first, first + number) for first, number in zip(box.start, box.shape, strict=True))
        assert box.offset == at
        assert torch.equal(tensors[box.name][place], share[at : at + size].view(box.shape))
        at += size


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", *KINDS])
def test_every_layout_of_either_backend_goes_on_where_any_other_one_stopped(kind: str, tmp_path: Path) -> None:
    save, layouts = (save_tiny_mixture, MIXTURE) if kind in KINDS else (save_tiny, ALL)
    model, world_size = save(kind, tmp_path / "model"), max(mesh_of(layout).dims.world_size for layout in layouts)
    play(play_states, model, layouts, tmp_path, world_size=world_size, directory=tmp_path, deadline_s=1200.0)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(world_size)]
    for before in layouts:
        (expected,) = {tuple(ranks[rank][before]) for rank in mesh_of(before).ranks}
        for after in layouts:
            if after != before:
                for rank in mesh_of(after).ranks:
                    assert ranks[rank][f"{before}>{after}"] == pytest.approx(expected, abs=1e-5), (before, after)


# --- bfloat16 -------------------------------------------------------------------------------------------------------

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
