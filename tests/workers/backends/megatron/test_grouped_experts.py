"""Experts that are computed together say and learn what they do one after the other, from where their matrices are."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corral.workers.backends.megatron.grouped_experts import GroupedExperts, as_one, grouped_product
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.gang_helpers import play
from tests.workers.backends.layout_scene import Variant
from tests.workers.backends.megatron.experts_scene import save_tiny_mixture
from tests.workers.backends.megatron_scene import make_megatron

COLUMNS, ROWS = 16, 24


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_products_of_all_groups_are_those_of_each(counts: list[int], dtype: torch.dtype, are_together: bool) -> None:
    """Groups without a token among them: their matrices learn nothing."""
    torch.manual_seed(sum(counts))
    tokens = torch.randn(sum(counts), COLUMNS, dtype=dtype)
    buffer = torch.randn(len(counts), ROWS * COLUMNS + 64, dtype=dtype)
    matrices = [row[: ROWS * COLUMNS].view(ROWS, COLUMNS) for row in buffer]
    if not are_together:
        matrices = [matrix.clone() for matrix in matrices]
    together, alone = ([part.detach().requires_grad_() for part in (tokens, *matrices)] for _ in range(2))
    ends = torch.tensor(counts).cumsum(0).int()
    found = grouped_product(together[0], ends, together[1:])
    expected = torch.cat([F.linear(part, m) for part, m in zip(alone[0].split(counts), alone[1:], strict=True)])
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    found.backward(gradient)
    expected.backward(gradient)
    for own, other in zip(together, alone, strict=True):
        assert own.grad is not None and other.grad is not None
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize(
    ("places", "are_one"), [((0, 1, 2), True), ((0, 2, 4), True), ((2, 1, 0), False), ((0, 1, 3), False)]
)
def test_matrices_at_equal_distances_are_not_copied(places: tuple[int, ...], are_one: bool) -> None:
    buffer = torch.randn(5, 4, 8)
    matrices = [buffer[place] for place in places]
    one = as_one(matrices)
    assert torch.equal(one, torch.stack(matrices))
    assert (one.data_ptr() == matrices[0].data_ptr()) is are_one


def test_matrices_of_a_model_that_is_trained_are_not_copied(tmp_path: Path) -> None:
    play(look_at_matrices, tmp_path, world_size=1, directory=tmp_path)


def look_at_matrices(_: ParallelContext, directory: Path) -> None:
    engine = make_megatron(save_tiny_mixture("qwen3_moe", directory / "model"), ParallelContext(), Variant())
    found = [module for module in engine._trainee.modules() if isinstance(module, GroupedExperts)]
    assert len(found) == 2
    for module in found:
        for name in ("linear_fc1", "linear_fc2"):
            matrices: list[Tensor] = module.matrices(name)
            assert as_one(matrices).data_ptr() == matrices[0].data_ptr()
