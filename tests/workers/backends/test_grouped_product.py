"""Experts that are computed together say and learn what they do one after the other, in the type of the products."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from corral.workers.backends.fsdp.experts import GROUPED_EXPERTS, register_grouped_experts
from corral.workers.backends.grouped_product import as_one, grouped_product
from tests.workers.backends.training_helpers import NumbersRead

FITTING, OTHER = (16, 24), (9, 11)  # of rows that torch multiplies in one call, and of others


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["together", "apart", "one tensor"]),
    st.sampled_from([FITTING, OTHER]),
)
def test_products_of_all_groups_are_those_of_each(
    counts: list[int], dtype: torch.dtype, held: str, size: tuple[int, int]
) -> None:
    """Groups without a token among them: their matrices learn nothing."""
    torch.manual_seed(sum(counts))
    columns, rows = size
    tokens = torch.randn(sum(counts), columns, dtype=dtype)
    buffer = torch.randn(len(counts), rows * columns + 64, dtype=dtype)
    matrices = [row[: rows * columns].view(rows, columns) for row in buffer]
    if held == "apart":
        matrices = [matrix.clone() for matrix in matrices]
    given_matrices = [torch.stack(matrices)] if held == "one tensor" else matrices
    together = [part.detach().requires_grad_() for part in (tokens, *given_matrices)]
    alone = [part.detach().requires_grad_() for part in (tokens, *matrices)]
    ends = torch.tensor(counts).cumsum(0).int()
    found = grouped_product(together[0], ends, together[1:])
    expected = torch.cat([F.linear(part, m) for part, m in zip(alone[0].split(counts), alone[1:], strict=True)])
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    found.backward(gradient)
    expected.backward(gradient)
    gradients = [part.grad for part in together]
    if held == "one tensor":
        assert gradients[1] is not None
        gradients = [gradients[0], *gradients[1]]
    for own, other in zip(gradients, alone, strict=True):
        assert own is not None and other.grad is not None
        torch.testing.assert_close(own, other.grad)


@pytest.mark.parametrize(
    ("places", "are_one"), [((0, 1, 2), True), ((0, 2, 4), True), ((2, 1, 0), False), ((0, 1, 3), False)]
)
def test_matrices_at_equal_distances_are_not_copied(places: tuple[int, ...], are_one: bool) -> None:
    buffer = torch.randn(5, 4, 8)
    matrices = [buffer[place] for place in places]
    one = as_one(matrices)
    assert torch.equal(one, torch.stack(matrices))
    assert (one.data_ptr() == matrices[0].data_ptr()) is are_one


class GroupedCalls(TorchDispatchMode):
    """The types of the grouped products that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.types += [args[0].dtype, args[1].dtype]
        return func(*args, **(kwargs or {}))


def experts_of(kind: str) -> Any:
    register_grouped_experts()
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
    config._experts_implementation = kind
    torch.manual_seed(0)
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts


def routed(tokens: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(tokens, 6, generator=generator).topk(2).indices  # nobody is sent to the last two
    return torch.randn(tokens, 32, generator=generator), chosen, torch.rand(tokens, 2, generator=generator)


def test_experts_of_float32_weights_are_multiplied_in_bfloat16_without_a_wait() -> None:
    found: dict[str, list[Tensor]] = {}
    for kind in ("eager", GROUPED_EXPERTS):
        experts, (hidden, chosen, counts) = experts_of(kind), routed()
        hidden.requires_grad_()
        counts.requires_grad_()
        calls, numbers = GroupedCalls(), NumbersRead()
        with calls, numbers:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind != "eager"):
                output = experts(hidden, chosen, counts)
            output.square().sum().backward()
        if kind != "eager":
            assert calls.types == [torch.bfloat16] * 12  # one product a matrix of an expert, two in the backward pass
            assert numbers.count == 0
        found[kind] = [output, hidden.grad, counts.grad, *(parameter.grad for parameter in experts.parameters())]
    for exact, rounded in zip(*found.values(), strict=True):
        assert rounded.dtype == torch.float32
        assert float((rounded - exact).detach().norm() / exact.norm()) < 0.01


def test_experts_in_float32_are_those_of_transformers_loop() -> None:
    hidden, chosen, counts = routed()
    torch.testing.assert_close(
        experts_of(GROUPED_EXPERTS)(hidden, chosen, counts), experts_of("eager")(hidden, chosen, counts)
    )
