"""int8 weights: how far they may be from the float weights, and that they always follow them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.linear import Int8Linear, quantize
from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling import SamplingParams
from tests.workers.engine.tiny_models import load_reference, reference_logprobs

DTYPES = (torch.float32, torch.bfloat16)
LAYER_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded_by_hand(row: list[float], scale: float) -> list[int]:
    return [max(-127, min(127, round(value / scale))) for value in row]


@given(
    st.lists(st.lists(st.floats(-1e4, 1e4, width=16), min_size=3, max_size=3), min_size=1, max_size=6),
    st.sampled_from(DTYPES),
)
def test_no_weight_moves_by_more_than_half_a_step_of_its_channel(rows: list[list[float]], dtype: torch.dtype) -> None:
    weight = torch.tensor(rows).to(dtype)
    rounded, scales = quantize(weight)
    for row, values, scale in zip(weight.tolist(), rounded.tolist(), scales.tolist(), strict=True):
        largest = max(map(abs, row))
        assert scale == pytest.approx(largest / 127 if largest else 1.0, rel=2**-8)
        for weight_value, value in zip(row, values, strict=True):
            assert abs(value) <= 127
            assert abs(weight_value - value * scale) <= scale * 0.5000001
        assert (max(map(abs, values)) == 127) == (largest > 0)


def test_a_channel_of_small_weights_is_as_exact_as_one_of_large_weights() -> None:
    weight = torch.randn(8, 64)
    values, _ = quantize(weight)
    weight[3] *= 2**-12
    assert torch.equal(quantize(weight)[0], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 64), (1024, 512), (10, 7)], ids=["small", "large", "without a kernel"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 40])
def test_every_way_to_multiply_is_by_the_same_integers(
    dtype: torch.dtype, shape: tuple[int, int], has_bias: bool, num_rows: int
) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype) if has_bias else None
    inputs = torch.randn(num_rows, shape[1]).to(dtype)
    linear = Int8Linear((weight, bias))
    for factor in (1, 3):
        weight.mul_(factor)
        before = weight.clone()
        linear.pack()
        assert torch.equal(weight, before)  # what is rounded next time is the float weight, not its rounding
        rounded, scales = quantize(weight)
        exact = inputs.double() @ rounded.double().T * scales.double()
        exact = exact if bias is None else exact + bias.double()
        relative = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(linear(inputs).double(), exact, rtol=relative, atol=relative * exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_of_a_product_is_bounded_by_half_a_step_for_each_input(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    weight, inputs = torch.randn(512, 256).to(dtype), torch.randn(20, 256).to(dtype)
    linear = Int8Linear((weight, None))
    linear.pack()
    exact = inputs.double() @ weight.double().T
    bound = inputs.double().abs().sum(1, keepdim=True) * quantize(weight)[1].double() / 2
    error = (linear(inputs).double() - exact).abs()
    assert (error <= bound + 2**-7 * exact.abs() + 1e-4).all()
    assert error.max() > 0


def rounded_reference(directory: Path) -> Any:
    """transformers with the matrices of the layers replaced by what their integers stand for."""
    model = load_reference(directory)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".weight") and name.split(".")[-2] in LAYER_MATRICES:
                for row in parameter:
                    scale = float(row.abs().max() / 127)
                    row.copy_(torch.tensor(rounded_by_hand(row.tolist(), scale)) * scale)
    return model


def sampled(engine: GenerationEngine) -> tuple[list[tuple[int, ...]], list[float]]:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=24, ignore_eos=True, sampling_seed=5)
    requests = [GenerationRequest(request_id=str(n), prompt=(5, 9, n), sampling=sampling) for n in range(5)]
    outputs = engine.generate(requests)
    return [output.output_ids for output in outputs], [lp for output in outputs for lp in output.output_logprobs]


def test_an_int8_maker_says_the_probabilities_that_it_sampled_by(directories: list[Path]) -> None:
    ids, logprobs = sampled(GenerationEngine(directories[0], quantization="int8"))
    rounded, exact = rounded_reference(directories[0]), load_reference(directories[0])

    def expected(model: Any) -> Tensor:
        return torch.cat([reference_logprobs(model, (5, 9, n), answer) for n, answer in enumerate(ids)])

    assert logprobs == pytest.approx(expected(rounded).tolist(), abs=1e-4)
    assert (torch.tensor(logprobs) - expected(exact)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_many_updates_an_int8_maker_is_bit_for_bit_one_that_started_with_the_weights(
    directories: list[Path], dtype: str
) -> None:
    updated = GenerationEngine(directories[0], quantization="int8", dtype=dtype)
    before = sampled(updated)
    for _ in range(3):
        for directory in directories:
            updated.apply_weights(updated.stage_weights(directory), version=directory.name)
    fresh = sampled(GenerationEngine(directories[1], quantization="int8", dtype=dtype))
    assert sampled(updated) == fresh
    assert fresh != before


def test_float16_weights_are_not_quantised(directories: list[Path]) -> None:
    with pytest.raises(ValueError, match="weights of dtype torch.float16 cannot be quantised; use float32 or bfloat16"):
        GenerationEngine(directories[0], quantization="int8", dtype="float16")
