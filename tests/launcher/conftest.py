"""Stub trials that leave nothing behind."""

import signal
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


@pytest.fixture
def obeys_ctrl_c() -> Iterator[None]:
    """What is started in the background of a shell, as these tests may be, ignores it, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
