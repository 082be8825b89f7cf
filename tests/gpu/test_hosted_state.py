"""Steps whose state comes from host memory and goes back beside them: the bits of steps whose state stays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corral.experiments.config.model import OptimizerConfig
from corral.workers.backends.fsdp.optimizers import AdamWAndMuon
from corral.workers.backends.host_copies import Offloaded, state_that_can_leave

pytestmark = pytest.mark.gpu
SIZES = ((512, 1024), (300,), (256, 4096), (7,), (1024, 512))
NUM_STEPS = 5


def make_parameters(device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in SIZES]


def make_optimizer(parameters: list[nn.Parameter]) -> AdamWAndMuon:
    """Muon for the last parameter, AdamW for the others."""
    groups: list[dict[str, Any]] = [
        {"params": parameters[:4], "weight_decay": 0.1, "num_matrices": 0},
        {"params": parameters[4:], "weight_decay": 0.1, "num_matrices": 1},
    ]
    return AdamWAndMuon(groups, OptimizerConfig(), compute_dtype=torch.float32)


def train(device: str, *, is_hosted: bool) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """The parameters, what the optimizer keeps of each, and how many bytes of that are on the device."""
    parameters = make_parameters(device)
    optimizer = make_optimizer(parameters)
    hosted = Offloaded([])
    generator = torch.Generator().manual_seed(2)
    for _ in range(NUM_STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        hosted.bring_back()
        optimizer.step()
        hosted = Offloaded(state_that_can_leave(optimizer) if is_hosted else [])
    kept, on_device = {}, 0
    for number, parameter in enumerate(parameters):
        for key, value in optimizer.state[parameter].items():
            on_device += value.untyped_storage().nbytes()
            kept[f"{key}.{number}"] = hosted.content_of(value).cpu().clone()
    return [parameter.detach().cpu() for parameter in parameters], kept, on_device


def test_a_state_in_host_memory_gives_the_bits_of_one_that_stays_and_leaves_nothing_behind(device: str) -> None:
    staying, kept, all_bytes = train(device, is_hosted=False)
    hosted, kept_by_host, left = train(device, is_hosted=True)
    assert left == 0 < all_bytes
    assert all(torch.equal(found, wanted) for found, wanted in zip(hosted, staying, strict=True))
    assert kept_by_host.keys() == kept.keys()
    assert all(torch.equal(kept_by_host[name], tensor) for name, tensor in kept.items())
