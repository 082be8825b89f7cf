"""The engine's norm is the trainer's, bit for bit."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from corral.workers.engine.decoder import RMSNorm

EPSILON = 1e-6


def transformers_norm(weight: torch.Tensor) -> Any:
    module: Any = Qwen2RMSNorm(weight.shape[0], eps=EPSILON)
    module.weight.data = weight
    return module


@given(
    num_rows=st.integers(1, 70),
    width=st.integers(1, 1100),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_norm_equals_that_of_transformers_bit_for_bit(num_rows: int, width: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, generator=generator)
    inputs = scale * torch.randn(num_rows, width, generator=generator)
    with torch.no_grad():
        assert torch.equal(RMSNorm.of(weight, EPSILON)(inputs), transformers_norm(weight)(inputs))


def test_a_norm_over_each_head_is_that_of_transformers_too() -> None:
    weight, inputs = torch.randn(32), torch.randn(5, 4, 32)
    with torch.no_grad():
        assert torch.equal(RMSNorm.of(weight, EPSILON)(inputs), transformers_norm(weight)(inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_of_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    weight, inputs = torch.randn(64), torch.randn(3, 64)
    exact = inputs.to(dtype).double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.to(dtype).double()
    result = RMSNorm.of(weight.to(dtype), EPSILON)(inputs.to(dtype))
    torch.testing.assert_close(result.double(), exact, rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=1e-6)


def test_a_weight_that_is_overwritten_in_place_is_what_counts() -> None:
    weight, inputs = torch.ones(8), torch.randn(2, 8)
    norm = RMSNorm.of(weight, EPSILON)
    before = norm(inputs)
    weight.mul_(2)
    assert torch.equal(norm(inputs), 2 * before)
