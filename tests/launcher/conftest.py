"""Stub trials that leave nothing behind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.trials import StubTrial

MakeTrial = Callable[..., StubTrial]


@pytest.fixture
def make_trial(tmp_path: Path) -> Iterator[MakeTrial]:
    trials: list[StubTrial] = []

    def make(behaviour: dict[str, list[str]] | None = None, **plan: Any) -> StubTrial:
        trials.append(StubTrial(tmp_path, behaviour or {}, **plan))
        return trials[-1]

    yield make
    for trial in trials:
        trial.close()
