"""One tiny model for all trials here, and the certainty that no test leaves a process behind."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from corral.workers.data.arithmetic import make_problems, write_model
from tests.integration.trial_helpers import Material, Trial, submit


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """An untrained model of some ten thousand parameters, and eight held-out problems."""
    directory = tmp_path_factory.mktemp("material")
    write_model(directory / "model", seed=1, hidden_size=32, num_layers=2)
    held_out = directory / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in make_problems(seed=1)[-8:]))
    return Material(model=directory / "model", held_out=held_out)


@pytest.fixture
def start_trial(material: Material, tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    """`submit` for this test's trials; whatever is left of them is ended after it."""
    trials: list[Trial] = []

    def start(recipe: str = "grpo", **options: object) -> Trial:
        start_one = partial(submit, recipe, tmp_path / str(len(trials)), material)
        trials.append(start_one(**options))  # type: ignore[arg-type]
        return trials[-1]

    yield start
    for trial in trials:
        trial.close()
