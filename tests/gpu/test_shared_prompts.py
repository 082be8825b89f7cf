"""Prompts that are computed once for their answers, by the device's own attention, in bfloat16."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.shared_prompts import PromptGroup, attend_with_shared_prompts
from tests.workers.backends.training_helpers import save_tiny_model
from tests.workers.shared_prompts.reference import HEAD_DIM, inputs_of, is_seen, plain_attention
from tests.workers.shared_prompts.scene import grouped_batch, make_engine, shares, train_actor

pytestmark = pytest.mark.gpu
CLOSE = 0.01  # of all numbers together: bfloat16 has eight bits


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert (found.cpu() - wanted).norm() <= CLOSE * wanted.norm()


@pytest.mark.parametrize("group", [PromptGroup(7, (3, 5, 1)), PromptGroup(300, (40, 40, 280))])
def test_outputs_and_gradients_are_those_of_a_softmax_over_what_each_token_may_see(
    group: PromptGroup, device: str
) -> None:
    inputs = inputs_of([group], dtype=torch.bfloat16, device=device)
    output = attend_with_shared_prompts(*(t.transpose(1, 2) for t in inputs), groups=[group], scaling=None)
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    expected = plain_attention(*exact, is_seen([group]), HEAD_DIM**-0.5)
    slopes = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    assert_close(output, expected.detach())
    found = torch.autograd.grad(output, inputs, slopes.to(device, output.dtype))
    for gradient, wanted in zip(found, torch.autograd.grad(expected, exact, slopes), strict=True):
        assert_close(gradient, wanted)


def test_an_engine_learns_alike_with_each_prompt_once(device: str, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model")
    context = ParallelContext(device=torch.device(device))
    each, once = (
        make_engine(directory, shares_prompts=shares_prompts, context=context, compute_dtype=torch.bfloat16)
        for shares_prompts in (False, True)
    )
    assert [shares(engine, grouped_batch(0)) for engine in (each, once)] == [False, True]
    for found, wanted in zip(train_actor(once), train_actor(each), strict=True):
        assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.05)
