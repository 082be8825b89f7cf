from pathlib import Path

import pytest

from tests.workers.backends.training_helpers import save_tiny_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2, for tests that do not change its files."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "qwen2")
