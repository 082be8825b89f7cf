"""Experts that are multiplied in one call by the device's own kernel, beside one product after the other."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.test_training import FLOAT32, seen_by_rank, train_on_all
from tests.workers.backends.layout_scene import plain_loop
from tests.workers.backends.trainer_helpers import play

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
from corral.workers.backends.grouped_product import grouped_product
from tests.workers.backends.megatron.experts_scene import save_tiny_mixture
from tests.workers.backends.megatron_scene import make_megatron

pytestmark = pytest.mark.gpu
COUNTS = [40, 0, 23, 1]  # experts that nobody is sent to learn nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_all_experts_in_one_call_are_those_of_each(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(sum(COUNTS), 64)
    matrices = torch.randn(len(COUNTS), 128, 64)
    together = [part.to(device, dtype).requires_grad_() for part in (tokens, *matrices)]
    alone = [part.detach().clone().requires_grad_() for part in together]
    found = grouped_product(together[0], torch.tensor(COUNTS, device=device).cumsum(0).int(), together[1:])
    expected = torch.cat([F.linear(part, m) for part, m in zip(alone[0].split(COUNTS), alone[1:], strict=True)])
    gradient = torch.randn_like(expected)
    found.backward(gradient)
    expected.backward(gradient)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for own, other in zip(together, alone, strict=True):
        assert own.grad is not None and other.grad is not None
        torch.testing.assert_close(own.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_a_mixture_trains_on_its_device_like_a_plain_loop_on_the_cpu(device: str, tmp_path: Path) -> None:
    model = save_tiny_mixture("mixed and shared", tmp_path / "model")
    play(train_on_all, model, FLOAT32, make_megatron, "d1", tmp_path, world_size=1, directory=tmp_path, device=device)
    _, expected = plain_loop(model)
    [seen] = seen_by_rank(tmp_path, 1)
    for own, plain in zip(seen["stats"], expected, strict=True):
        assert own["sft/loss"] == pytest.approx(plain["sft/loss"], rel=1e-3)
