"""The recipes that ship: they load, they fit a laptop, and the reference of keys is up to date."""

from importlib.resources import files
from pathlib import Path

import pytest

from corral.experiments.documentation import configuration_reference
from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan
from corral.experiments.registry import load_experiment
from corral.scheduling.placement import NodeShape, place
from tests.experiments.broken_yaml import rows, write_inputs

_RECIPES = sorted(path.name for path in files("corral.experiments.recipes").iterdir() if path.name.endswith(".yaml"))
_REFERENCE = Path(__file__).parents[2] / "docs" / "configuration.md"


def _plan(recipe: str, folder: Path) -> RunPlan:
    write_inputs(folder)
    for name in ("train_sft.jsonl", "train_grpo.jsonl"):
        (folder / name).write_text(rows(128))
    model = "model" if recipe.endswith("sft.yaml") else "actor"
    data = "train_sft.jsonl" if model == "model" else "train_grpo.jsonl"
    models = [model, "critic", "ref"] if recipe == "arithmetic_ppo.yaml" else [model]
    overrides = [
        *(f"{name}.path={folder / 'model'}" for name in models),
        f"dataset.path={folder / data}",
        f"evaluation.dataset.path={folder / 'heldout.jsonl'}",
    ]
    experiment = load_experiment(str(files("corral.experiments.recipes") / recipe), overrides)
    assert list(experiment.find_warnings()) == []
    identity = TrialIdentity(experiment=experiment.name, trial="t", uuid="0" * 32, directory=folder)
    return make_run_plan(experiment, identity, "local")


def test_recipes_are_installed() -> None:
    assert {"arithmetic_sft.yaml", "arithmetic_grpo.yaml"} <= set(_RECIPES)


@pytest.mark.parametrize("recipe", _RECIPES)
def test_recipe_makes_a_plan_that_fits_a_laptop(recipe: str, tmp_path: Path) -> None:
    plan = _plan(recipe, tmp_path)
    assert place(plan.scheduling, NodeShape(cpus=8, gpus=0, mem_mb=8 * 1024)).num_nodes == 1


@pytest.mark.parametrize("recipe", _RECIPES)
def test_recipe_looks_for_its_files_beside_itself_until_told_otherwise(recipe: str) -> None:
    with pytest.raises(ValueError, match="demo/model does not exist"):
        load_experiment(str(files("corral.experiments.recipes") / recipe))


def test_configuration_reference_is_up_to_date() -> None:
    hint = "run: python -m corral.experiments.documentation --write docs/configuration.md"
    assert _REFERENCE.read_text(encoding="utf-8") == configuration_reference(), hint
