"""One tiny model for all trials here, and the certainty that no test leaves a process behind."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.four_roles import write_experiment
from tests.integration.trial_helpers import Material, Trial, make_material, submit


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def four_roles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an experiment with four roles; trials in it are told apart by their names."""
    folder = tmp_path_factory.mktemp("four_roles")
    write_experiment(folder)
    return folder


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
