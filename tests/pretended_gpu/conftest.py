"""These tests are about the pretended GPU, or need what it alone can tell; they are skipped where there is none."""

import pytest
import torch

from tests.pretended_gpu.build import why_not_pretended


@pytest.fixture(autouse=True, scope="session")
def pretended() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_name() != "a pretended GPU":
        pytest.skip(f"no pretended GPU: {why_not_pretended() or 'pytest -p tests.pretended_gpu.installed gives one'}")
