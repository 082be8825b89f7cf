"""The recipes that ship: they load, they fit a laptop, and the reference of keys is up to date."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import quantized_makers
from benchmarks.run_recipes import (
    MADE,
    PROMISES,
    UNTRAINED,
    Promise,
    Result,
    all_recipes,
    answers_to_goal,
    backend_settings,
    compared_algorithms,
    example_paths,
    kind_of,
    read_values,
    recipe_of,
    render,
    with_needs,
)
from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.experiment import Experiment
from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan
from corral.experiments.registry import EXPERIMENTS, load_experiment, schema_text
from corral.scheduling.placement import NodeShape, place
from tests.configuration_reference import SHIPPED, configuration_reference
from tests.environments import give_tokenizer, needs_environments
from tests.experiments.broken_yaml import rows, write_inputs

_RECIPES = all_recipes()
_EACH = [
    pytest.param(recipe, id=recipe.name, marks=[needs_environments] if "environment" in recipe.name else [])
    for recipe in _RECIPES
]
_SCHEMA = Path(__file__).parents[2] / "experiments" / "recipes" / "experiment.schema.json"
_REFERENCE = Path(__file__).parents[2] / "docs" / "configuration.md"


def _load(recipe: Path, folder: Path, *more: str) -> Experiment:
    write_inputs(folder)
    give_tokenizer(folder / "model")
    examples = example_paths(recipe)
    for name in examples.values():
        if name.endswith(".jsonl"):
            count = 10 if name.startswith("heldout") else 128
            text = pairs(count) if "preferences" in name else rows(count)
            (folder / name).write_text(
                text.replace('"answer"', '"hinted": "1=", "answer"') if "hinted" in name else text
            )
    paths = {key: folder / (UNTRAINED if name in MADE else name) for key, name in examples.items()}
    overrides = [f"{key}={path}" for key, path in paths.items()]
    return load_experiment(recipe, [*overrides, *more])


def _plan(recipe: Path, folder: Path) -> RunPlan:
    experiment = _load(recipe, folder)
    assert list(experiment.find_warnings()) == []
    identity = TrialIdentity(experiment=experiment.name, trial="t", uuid="0" * 32, directory=folder)
    return make_run_plan(experiment, identity, "local")


def pairs(count: int) -> str:
    """A jsonl file of preferences."""
    made = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(count)]
    return "".join(json.dumps(row) + "\n" for row in made)


def test_recipes_are_installed() -> None:
    assert {kind_of(recipe) for recipe in _RECIPES} == set(PROMISES) == set(EXPERIMENTS)
    assert kind_of(all_recipes()[0]) == "sft"  # what the others start from


def test_recipes_run_behind_those_that_make_what_they_need() -> None:
    assert sorted(with_needs(_RECIPES)) == sorted(_RECIPES)
    taught = ["arithmetic_sft.yaml", "arithmetic_grpo.yaml", "arithmetic_distillation.yaml"]
    assert [path.name for path in with_needs([recipe_of("distillation")])] == taught
    assert [path.name for path in with_needs([recipe_of("dapo")])] == taught[:2]


@pytest.mark.parametrize("recipe", _EACH)
def test_recipe_makes_a_plan_that_fits_a_laptop(recipe: Path, tmp_path: Path) -> None:
    plan = _plan(recipe, tmp_path)
    assert place(plan.scheduling, NodeShape(cpus=8, gpus=0, mem_mb=8 * 1024)).num_nodes == 1


def test_another_backend_answers_where_any_does() -> None:
    settings = {recipe.name: backend_settings(recipe, "sglang") for recipe in _RECIPES}
    assert settings["arithmetic_tools.yaml"] == ["allocation=sglang:d1+fsdp:d1"]
    assert settings["arithmetic_dpo.yaml"] == settings["arithmetic_sft.yaml"] == []


@pytest.mark.parametrize("recipe", _EACH)
def test_recipe_looks_for_its_files_beside_itself_until_told_otherwise(recipe: Path) -> None:
    with pytest.raises(ValueError, match="demo/(model|sft|tools_sft|grpo) does not exist"):
        load_experiment(recipe)


def test_the_table_of_recipes_says_which_number_went_where_it_should(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 0, "eval/loss": 2.0}\n{"step": 1, "sft/loss": 9.0}\n{"step": 2, "eval/loss": 1.5}\n')
    falls, rises = Promise("eval/loss", "it falls", False), Promise("eval/loss", "it rises", True)
    values = read_values(metrics, "eval/loss")
    results = [
        Result(recipe="a.yaml", promise=falls, values=values, seconds=61.2),
        Result(recipe="b.yaml", promise=rises, values=values, seconds=1.0),
        Result(recipe="c.yaml", promise=rises, values=read_values(tmp_path / "none", "eval/loss"), seconds=2.0),
    ]
    assert [result.is_good for result in results] == [True, False, False]
    assert render(results).splitlines() == [
        "RECIPE  WHAT MOVES  BEFORE  AFTER  TIME",
        "a.yaml  it falls    2.000   1.500  61 s  yes",
        "b.yaml  it rises    2.000   1.500  1 s   NO",
        "c.yaml  it rises    -       -      2 s   FAILED",
    ]


def test_algorithms_are_compared_by_the_answers_that_they_took(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert answers_to_goal(metrics, 0.7) is None
    evaluated = [{"step": n, "eval/reward/mean": 0.5 + 0.05 * n} for n in (0, 2, 4)]
    trained = [{"step": n, "ppo/num_answers": 64.0} for n in (1, 2, 3, 4)]
    lines = sorted([*trained, *evaluated], key=lambda line: (line["step"], "ppo/num_answers" not in line))
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [answers_to_goal(metrics, goal) for goal in (0.5, 0.6, 0.7, 0.9)] == [0, 128, 256, None]
    assert {"grpo", "dapo", "gspo"} <= set(compared_algorithms())
    assert "ppo" not in compared_algorithms()


def test_makers_of_the_comparison_differ_in_what_they_round_and_what_the_loss_weighs(tmp_path: Path) -> None:
    [recipe] = [recipe for recipe in _RECIPES if recipe.name == quantized_makers.GRPO_RECIPE]
    seen = {}
    for maker, overrides in quantized_makers.MAKERS.items():
        experiment = _load(recipe, tmp_path, *overrides)
        assert isinstance(experiment, AsyncPPOExperiment)
        weighs = experiment.ppo.is_ratio_mode if experiment.ppo.use_decoupled_loss else "nothing"
        is_warned_of = any("engine.quantization" in warning for warning in experiment.find_warnings())
        age = experiment.rollout.max_head_offpolicyness
        seen[maker] = (experiment.engine.quantization, age, weighs, is_warned_of)
    assert seen == {
        "float32": (None, 1, "token_mask", False),
        "int8-corrected": ("int8", 1, "token_truncate", False),
        "float32-fresh": (None, 0, "token_mask", False),
        "int8-fresh-uncorrected": ("int8", 0, "nothing", True),
    }


def test_the_table_of_makers_is_of_trials_that_came_to_their_end(tmp_path: Path) -> None:
    steps = [{"rewards/mean": 0.5, "gap/mean": 0.01, "gap/max": 0.25}, {"rewards/mean": 0.7}]
    evaluations = [{"eval/reward/mean": 0.5}, {"eval/reward/mean": 0.9}]
    lines = (evaluations[0], *steps, evaluations[1])
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert quantized_makers.read_run(tmp_path, maker="int8", seed=2) is None
    (tmp_path / "exports" / "final").mkdir(parents=True)
    run = quantized_makers.read_run(tmp_path, maker="int8", seed=2)
    assert run is not None
    assert quantized_makers.render([run, replace(run, seed=1, held_out=[0.5, 0.7])]).splitlines() == [
        "MAKER  HELD-OUT REWARD BY SEED  MEAN          CURVE         LAST STEPS    GAP MEAN  GAP MAX",
        "int8   1:0.700 2:0.900          0.800+-0.100  0.650+-0.050  0.600+-0.000  1.0e-02   2.5e-01",
    ]


def test_configuration_reference_is_up_to_date() -> None:
    hint = "run: python -m tests.configuration_reference --write docs/configuration.md"
    assert _REFERENCE.read_text(encoding="utf-8") == configuration_reference(), hint


def test_the_schema_that_ships_is_printed_by_rl_submit_and_knows_every_key_of_the_shipped_files() -> None:
    schema = json.loads(schema_text())
    hint = "run: rl-submit --schema > experiments/recipes/experiment.schema.json"
    assert json.loads(_SCHEMA.read_text(encoding="utf-8")) == schema, hint
    for file in SHIPPED:
        assert file.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema="), file
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        definition = schema["$defs"][EXPERIMENTS[data["experiment"]].__name__]
        assert unknown_keys(data, definition, schema["$defs"]) == [], file
    actor = schema["$defs"]["ActorModelConfig"]
    assert unknown_keys({"path": "x", "learning_rate": 1.0}, actor, schema["$defs"]) == ["learning_rate"]
    assert schema["$defs"]["RolloutConfig"]["properties"].keys() >= {"max_staleness", "max_head_offpolicyness"}


def unknown_keys(data: dict[str, Any], definition: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    """Keys of a mapping, and of mappings in it, that its definition does not let through."""
    found = []
    for key, value in data.items():
        below = definition["properties"].get(key)
        if below is None:
            found.append(key)
        kinds = [] if below is None else below.get("anyOf", [below])
        refs = [definitions[kind["$ref"].rpartition("/")[2]] for kind in kinds if "$ref" in kind]
        if isinstance(value, dict) and refs:
            found += unknown_keys(value, refs[0], definitions)
    return found
