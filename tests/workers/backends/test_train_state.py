"""A training state, whatever the optimizer keeps and however its ranks cut it, is read back exactly by any others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from corral.workers.backends.base import Numbers
from corral.workers.backends.fsdp.engine import make_shard, read_state
from corral.workers.backends.train_state import ADAMW, HEADER, StoredState, TrainStateHeader, read_header
from corral.workers.checkpoint.durable_file import FileEntry
from tests.workers.checkpoint.sealing import describe

SHAPES = {"embed.weight": (7, 4), "norm.weight": (3,), "head.weight": (1, 6)}
Cut = tuple[tuple[int, ...], tuple[Placement, ...]]
"""Mesh and placements."""
WHOLE: Cut = ((1,), (Replicate(),))
CUTS: list[Cut] = [
    WHOLE,
    ((2,), (Shard(0),)),
    ((5,), (Shard(0),)),
    ((2, 2), (Shard(0), Replicate())),
    ((3, 2), (Replicate(), Shard(0))),
]


@contextmanager
def rank_of(cut: Cut, place: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """What one rank of a mesh is, without the others; gives a function that takes its part of a whole tensor."""
    shape, placements = cut
    world_size = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        # Rank 0 at every place in turn: torch keeps what it knows of equal meshes, and where this process stands in it.
        ranks = torch.tensor([(other - place) % world_size for other in range(world_size)])
        mesh = DeviceMesh("cpu", ranks.reshape(shape))
        yield lambda whole: distribute_tensor(whole, mesh, placements, src_data_rank=None)
    finally:
        dist.destroy_process_group()


def whole_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trained(parameters: dict[str, nn.Parameter], part: Callable[[Tensor], Tensor]) -> torch.optim.Optimizer:
    """An optimizer with two moments of each parameter but the last, which it has not stepped on yet."""
    optimizer = torch.optim.AdamW(list(parameters.values()))
    for name in list(parameters)[:-1]:
        optimizer.state[parameters[name]] = {
            "exp_avg": part(whole_tensors(1)[name]),
            "exp_avg_sq": part(whole_tensors(2)[name]),
            "step": torch.tensor(5.0),
        }
    return optimizer


def parameters_of(part: Callable[[Tensor], Tensor], seed: int) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(part(tensor)) for name, tensor in whole_tensors(seed).items()}


def write(
    directory: Path,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
    num_ranks: int,
) -> dict[str, FileEntry]:
    header = TrainStateHeader(step=5, seed=0, num_ranks=num_ranks)
    return make_shard(parameters, optimizer, header, rank=rank).write(directory)


def stored(directory: Path, first_file: int = 0) -> StoredState:
    return StoredState(directory=directory, header=read_header(directory), first_file=first_file)


@pytest.mark.parametrize("after", CUTS, ids=str)
@pytest.mark.parametrize("before", CUTS, ids=str)
def test_a_state_is_the_same_however_it_is_cut_before_and_after(before: Cut, after: Cut, tmp_path: Path) -> None:
    num_before, num_after = (torch.Size(cut[0]).numel() for cut in (before, after))
    files = {}
    for rank in range(num_before):
        with rank_of(before, rank) as part:
            parameters = parameters_of(part, seed=0)
            optimizer = trained(parameters, part)
            files |= write(tmp_path, parameters, optimizer, rank=rank, num_ranks=num_before)
    assert files == describe(tmp_path)
    for rank in range(num_after):
        with rank_of(after, rank) as part:
            parameters = parameters_of(part, seed=9)
            expected = parameters_of(part, seed=0)
            optimizer = torch.optim.AdamW(list(parameters.values()))
            # What was there before a fall-back must be gone.
            optimizer.state[parameters["head.weight"]] = {"exp_avg": torch.zeros(1)}
            first = rank * num_before // num_after
            read_state(stored(tmp_path, first), parameters, optimizer)
            wanted = trained(expected, part)
            for name, parameter in parameters.items():
                assert_same(parameter, expected[name])
                state = optimizer.state.get(parameter, {})
                assert state.keys() == wanted.state.get(expected[name], {}).keys()
                for key, value in state.items():
                    assert_same(value, wanted.state[expected[name]][key])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    if isinstance(expected, DTensor):
        assert isinstance(actual, DTensor) and actual.placements == expected.placements
        actual, expected = actual.to_local(), expected.to_local()
    assert torch.equal(actual, expected)


def test_ranks_as_many_as_before_open_their_own_file_only(tmp_path: Path) -> None:
    cut: Cut = ((3,), (Shard(0),))
    for rank in range(3):
        with rank_of(cut, rank) as part:
            parameters = parameters_of(part, seed=0)
            write(tmp_path, parameters, trained(parameters, part), rank=rank, num_ranks=3)
    for rank in (0, 2):
        (tmp_path / f"train_state-{rank:05d}-of-00003.safetensors").unlink()
    with rank_of(cut, 1) as part:
        parameters = parameters_of(part, seed=9)
        optimizer = torch.optim.AdamW(list(parameters.values()))
        read_state(stored(tmp_path, 1), parameters, optimizer)
        for name, expected in parameters_of(part, seed=0).items():
            assert_same(parameters[name], expected)


def test_a_missing_piece_is_an_error_that_counts_what_is_missing(tmp_path: Path) -> None:
    with rank_of(((2,), (Shard(0),)), 0) as part:
        parameters = parameters_of(part, seed=0)
        write(tmp_path, parameters, trained(parameters, part), rank=0, num_ranks=1)
    with rank_of(WHOLE, 0) as part:
        parameters = parameters_of(part, seed=9)
        with pytest.raises(ValueError, match=r"lacks 12 of the values of parameter\.embed\.weight"):
            read_state(stored(tmp_path), parameters, torch.optim.AdamW(list(parameters.values())))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"parameter.w": [2]}, None),  # before the first step
        ({"parameter.w": [2], "exp_avg.w": [2], "exp_avg_sq.w": [2], "step.w": []}, None),
        (
            {"parameter.w": [2], "momentum_buffer.w": [2]},
            "keeps momentum_buffer of w, and this optimizer keeps exp_avg",
        ),
        ({"parameter.w": [3]}, r"stored w has shape \(3,\), the model's has \(2,\)"),
        ({"parameter.v": [2]}, r"of another model: 1 parameters are missing there \['w'\], 1 are unknown here \['v'\]"),
        ({"parameter.q_proj.lora_A.weight": [2]}, "is of adapters: 1 parameters are missing"),
    ],
)
def test_a_state_of_another_model_or_optimizer_is_refused_by_name(
    sizes: dict[str, list[int]], problem: str | None, tmp_path: Path
) -> None:
    header = TrainStateHeader(step=1, seed=0, num_ranks=1, sizes=sizes)
    with nullcontext() if problem is None else pytest.raises(ValueError, match=problem):
        StoredState(directory=tmp_path, header=header).check({"w": (2,)}, lambda _: ADAMW)


def test_what_was_copied_is_written_as_it_was_whatever_the_steps_after_it_change(tmp_path: Path) -> None:
    with rank_of(((2,), (Shard(0),)), 1) as part:
        parameters = parameters_of(part, seed=0)
        optimizer = trained(parameters, part)
        header = TrainStateHeader(step=5, seed=0, num_ranks=2)
        at_once = make_shard(parameters, optimizer, header, rank=1).write(tmp_path / "at once")
        shard = make_shard(parameters, optimizer, header, rank=1)
        copied = shard.copied()
        for tensor in shard.tensors.values():  # the engine's own, which a step changes in place
            tensor.data += 1
    assert copied.write(tmp_path / "later") == at_once
    assert shard.write(tmp_path / "changed") != at_once  # the step did change what the engine holds


def test_numbers_of_a_role_come_back_exactly(tmp_path: Path) -> None:
    numbers: Numbers = {"mean": 0.1 + 0.2, "moments": [1e-300, float("inf"), -0.0]}
    header = TrainStateHeader(step=3, seed=2**62 + 1, num_ranks=2, extra=numbers)
    assert make_shard({}, None, header, rank=0).write(tmp_path) == describe(tmp_path)
    assert read_header(tmp_path) == header
    (tmp_path / HEADER).write_text('{"format": 1}')
    with pytest.raises(ValueError, match="has format 1, and this version of corral reads 3: continue with the version"):
        read_header(tmp_path)
