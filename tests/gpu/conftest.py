"""The device that these tests are for, and why they are skipped where it is missing.

`pytest tests/gpu --device cpu` runs the same tests on a CPU: it shows that they say what is true of any device.
"""

import pytest
import torch


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    chosen: str = request.config.getoption("--device")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return chosen


@pytest.fixture(params=[1, 2, 4])
def num_devices(request: pytest.FixtureRequest, device: str) -> int:
    """One rank each; on a CPU no more than two, to try them out."""
    count: int = request.param
    available = torch.cuda.device_count() if device == "cuda" else 2
    if count > available:
        pytest.skip(f"{available} devices, not {count}")
    return count
