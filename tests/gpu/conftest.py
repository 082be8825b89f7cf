"""The device that these tests are for, and why they are skipped where it is missing.

`make test` runs them on a pretended GPU (tests/pretended_gpu), and `make gpu` on a real one. `pytest tests/gpu --device
cpu` runs them on a CPU: it shows that they say what is true of any device.
"""

import pytest
import torch

from tests.pretended_gpu.build import why_not_pretended


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    chosen: str = request.config.getoption("--device")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"no GPU; {why_not_pretended() or '`make test` pretends one'}")
    return chosen


@pytest.fixture(params=[1, 2, 4])
def num_devices(request: pytest.FixtureRequest, device: str) -> int:
    """One rank each; on a CPU no more than two, to try them out."""
    return at_least(request.param, device)


@pytest.fixture
def two_devices(device: str) -> int:
    return at_least(2, device)


def at_least(count: int, device: str) -> int:
    available = torch.cuda.device_count() if device == "cuda" else 2
    if count > available:
        pytest.skip(f"{available} GPUs, not {count}")
    return count
