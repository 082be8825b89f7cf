from pathlib import Path
from typing import Any

import pytest

from tests.workers.engine.tiny_models import load_reference, save_tiny_model


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of the same tiny Qwen2."""
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_model(root / f"v{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="session")
def references(directories: list[Path]) -> list[Any]:
    """The same two in transformers."""
    return [load_reference(directory) for directory in directories]
