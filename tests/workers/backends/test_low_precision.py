"""Products in bfloat16 are those of autocast, and leave no copy of the weights behind."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.low_precision import cast_per_use
from tests.workers.backends.test_fsdp import negative_logprobs, trainable_sample
from tests.workers.backends.training_helpers import save_tiny_model, tiny_engine


def two_layers(*, bias: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 8, bias=bias))


def outcome(model: nn.Module, input: Tensor) -> list[Tensor]:
    """Output and all gradients under autocast."""
    input = input.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(input)
    (output.float() ** 2).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [input.grad, *(parameter.grad for parameter in model.parameters())]
    return [output, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24)])
def test_outputs_and_gradients_are_those_of_autocast(shape: tuple[int, ...], bias: bool) -> None:
    expected_model, model = two_layers(bias=bias), two_layers(bias=bias)
    cast_per_use(model)
    input = torch.randn(shape)
    expected, actual = outcome(expected_model, input), outcome(model, input)
    assert len(actual) == len(expected) == 2 + len(list(model.parameters()))
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_without_autocast_nothing_changes() -> None:
    expected_model, model = two_layers(bias=True), two_layers(bias=True)
    cast_per_use(model)
    input = torch.randn(3, 24)
    assert torch.equal(model(input), expected_model(input))


class CopiesAlive(TorchDispatchMode):
    """Counts the elements of weights that are alive in bfloat16, and the most that ever were."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = {tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim == 2}
        self._now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and func is torch.ops.aten._to_copy.default and self._is_copy(result):
            self._add(result.numel())
            weakref.finalize(result.untyped_storage(), self._add, -result.numel())
        return result

    def _is_copy(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in self._shapes

    def _add(self, count: int) -> None:
        self._now += count
        self.peak = max(self.peak, self._now)


@pytest.mark.parametrize(
    "run",
    [
        lambda engine: engine.forward(trainable_sample()),
        lambda engine: engine.train_batch(trainable_sample(), loss_fn=negative_logprobs),
    ],
    ids=["forward", "train_batch"],
)
def test_one_weight_at_a_time_is_held_in_bfloat16(run: Callable[[FSDPEngine], object], tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, num_hidden_layers=4, vocab_size=96)
    engine = tiny_engine(directory, compute_dtype=torch.bfloat16)
    largest = max(parameter.numel() for parameter in engine.model.parameters())
    with CopiesAlive(engine.model) as copies:
        run(engine)
    assert 0 < copies.peak <= largest
