from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from corral.experiments.trial.directory import TrialDirectory
from tests.workers.master.trials import Begin, Trainers, run_master, trial_of


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    def trial_and_start(*overrides: str) -> tuple[TrialDirectory, Callable[[Trainers], int]]:
        plan, trial = trial_of(tmp_path, *overrides)
        return trial, partial(run_master, plan, trial, monkeypatch=monkeypatch)

    return trial_and_start
