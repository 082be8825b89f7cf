"""Attention over a row that has prompts once, beside a softmax over what each token may see."""

import pytest
import torch
from torch import Tensor

from corral.workers.shared_prompts import PromptGroup, _SharedPromptAttention, attend_with_shared_prompts
from tests.workers.shared_prompts.reference import HEAD_DIM, HEADS, KEY_HEADS, inputs_of, is_seen, plain_attention

ROWS = {
    "ragged": (PromptGroup(7, (3, 5, 1)),),
    "equal": (PromptGroup(4, (4, 4, 4)),),
    "several": (PromptGroup(1, (2, 2)), PromptGroup(6, (9, 9, 3)), PromptGroup(0, (5, 5, 8))),
    "long": (PromptGroup(300, (40, 280)),),  # more than a block of the kernel
}


@pytest.mark.parametrize(("row", "scaling"), [*((row, None) for row in ROWS), ("several", 0.7)])
def test_results_and_gradients_are_those_of_a_softmax_over_what_each_token_may_see(
    row: str, scaling: float | None
) -> None:
    groups = ROWS[row]
    inputs = inputs_of(groups)
    output = attend_with_shared_prompts(*(tensor.transpose(1, 2) for tensor in inputs), groups=groups, scaling=scaling)
    slopes = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    found = torch.autograd.grad(output, inputs, slopes)

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = plain_attention(*exact, is_seen(groups), scaling or HEAD_DIM**-0.5)
    wanted = torch.autograd.grad(expected, exact, slopes.double())
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    for gradient, of_exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), of_exact, rtol=1e-4, atol=1e-5)


def test_under_autocast_products_are_of_its_type_and_sums_are_not() -> None:
    groups = ROWS["several"]
    inputs = inputs_of(groups)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend_with_shared_prompts(*(t.transpose(1, 2) for t in inputs), groups=groups, scaling=None)
    assert output.dtype == torch.bfloat16
    exact = [tensor.detach().bfloat16().double() for tensor in inputs]
    expected = plain_attention(*exact, is_seen(groups), HEAD_DIM**-0.5)
    assert float((output - expected).detach().abs().max()) < 0.02  # two roundings to 8 bits of numbers near 1


def test_no_more_is_kept_for_the_backward_pass_than_of_one_call_over_the_row() -> None:
    groups = (PromptGroup(64, (8,) * 16),)
    inputs = inputs_of(groups)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend_with_shared_prompts(*(t.transpose(1, 2) for t in inputs), groups=groups, scaling=None)
    width = groups[0].num_tokens
    numbers = width * (2 * HEADS * HEAD_DIM + 2 * KEY_HEADS * HEAD_DIM + HEADS)
    assert sum(kept.values()) == 4 * numbers


def test_on_a_gpu_its_kernel_gets_what_torch_says_that_it_takes() -> None:
    groups = ROWS["several"]
    inputs = [tensor.transpose(1, 2) for tensor in inputs_of(groups, dtype=torch.bfloat16, device="meta")]
    output = _SharedPromptAttention.apply(*inputs, groups, None)  # type: ignore[no-untyped-call]
    gradients = torch.autograd.grad(output, inputs, torch.empty_like(output))
    assert [output.shape, *(g.shape for g in gradients)] == [inputs[0].shape, *(t.shape for t in inputs)]
