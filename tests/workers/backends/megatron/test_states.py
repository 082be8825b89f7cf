"""What a rank of Megatron keeps of a state is a part of the model, and any layout of either backend goes on from it."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.workers.backends.megatron.state import Stretch, boxes
from tests.workers.backends.layout_scene import mesh_of, save_tiny
from tests.workers.backends.megatron.experts_scene import KINDS, save_tiny_mixture
from tests.workers.backends.megatron.states_scene import play_states
from tests.workers.backends.trainer_helpers import play

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
