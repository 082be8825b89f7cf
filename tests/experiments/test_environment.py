"""An environment in an experiment file: its tasks are the rows, and what contradicts it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.config.base import merged
from corral.experiments.config.cluster import GroupConfig
from corral.experiments.config.data import DatasetConfig, EvaluationConfig
from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.config.model import ActorModelConfig
from corral.experiments.config.rollout import RolloutConfig
from corral.experiments.errors import ConfigError
from corral.experiments.inputs.environment_tasks import find_environment
from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan
from corral.experiments.problems import environment_problems
from corral.experiments.registry import load_experiment
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.worker_specs import EnvironmentSpec, RolloutWorkerSpec
from corral.launcher.submit.prepare import changed_environment, kept_rows
from corral.scheduling.scheduling import default_scheduling
from tests.environments import PACKAGES, add_template, give_tokenizer, needs_environments
from tests.experiments.broken_yaml import write_inputs

OWN = (
    "rollout.environment.id=adding",
    "rollout.environment.args={}",
    "train_batch_size=1",
    "rollout.environment.held_out_args={taskset: {num_tasks: 2}}",
)
RECIPE = Path(__file__).parents[2] / "experiments" / "recipes" / "arithmetic_environment.yaml"


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))


def load(folder: Path, *overrides: str) -> AsyncPPOExperiment:
    """The recipe with an environment of three tasks."""
    write_inputs(folder)
    give_tokenizer(folder / "model")
    experiment = load_experiment(RECIPE, [f"actor.path={folder / 'model'}", *OWN, *overrides])
    assert isinstance(experiment, AsyncPPOExperiment)
    return experiment


def plan_of(experiment: AsyncPPOExperiment, folder: Path) -> RunPlan:
    identity = TrialIdentity(experiment=experiment.name, trial="t", uuid="0" * 32, directory=folder)
    return make_run_plan(experiment, identity, "local")


@needs_environments
def test_tasks_are_listed_as_rows_of_the_trials_own(tmp_path: Path) -> None:
    experiment = load(tmp_path)
    listed = {key: [json.loads(line) for line in rows.splitlines()] for key, rows in experiment.listed_rows.items()}
    names = {key: [row["id"] for row in rows] for key, rows in listed.items()}
    assert names == {"dataset": ["sum-1", "sum-2", "sum-3"], "evaluation.dataset": ["sum-1", "sum-2"]}
    assert listed["dataset"][0]["prompt"] == "1+1="
    assert listed["dataset"][0]["task"] == {"idx": 0, "id": "sum-1", "prompt": "1+1=", "answer": "2"}
    plan = plan_of(experiment, tmp_path / "trial")
    [worker] = plan.all_of(RolloutWorkerSpec)
    assert worker.dataset.config.path == tmp_path / "trial" / "tasks.jsonl" and worker.dataset.num_rows == 3
    assert worker.held_out and worker.held_out.datasets[""].num_rows == 2
    assert worker.environment and worker.environment.packages["verifiers"].startswith("0.4.")
    assert worker.rollout.environment and worker.rollout.environment.python
    assert RunPlan.from_json(plan.to_json()) == plan
    earlier = worker.model_copy(update={"environment": EnvironmentSpec(packages={"adding": "0.1"}, sha256="0")})
    [warning] = changed_environment(plan.model_copy(update={"workers": [earlier]}))
    assert warning.startswith("environment adding is not what the trial began with: adding 0.1 then, verifiers 0.4.")

    # A trial that goes on with other ranks, and one that takes some of its tasks, read them from the file.
    (trial := TrialDirectory(tmp_path / "trial")).path.mkdir()
    kept = trial.tasks_path
    kept.write_bytes(b"".join(experiment.listed_rows["dataset"].splitlines(keepends=True)[:2]))
    assert list(kept_rows(trial)) == [f"dataset.path={kept}"]
    again = load(tmp_path, *kept_rows(trial), "evaluation=null", "rollout.environment.held_out_args=null")
    assert "dataset" not in again.listed_rows and again.checked_dataset.num_rows == 2
    assert plan_of(again, tmp_path / "trial").all_of(RolloutWorkerSpec)[0].dataset.config.path == kept


def asked(**settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"id": "adding", **settings})


@needs_environments
def test_what_cannot_be_loaded_or_listed_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ValueError, match="cannot be loaded by .*SumTasksetConfig num_taks Extra inputs are not permitted"
    ):
        find_environment(asked(args={"taskset": {"num_taks": 3}}))
    with pytest.raises(ValueError, match="tasks without end; say how many with rollout.environment.num_tasks"):
        find_environment(asked(args={"taskset": {"is_endless": True}}), lists=["dataset"])


def test_a_python_without_verifiers_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="(?s)there is no verifiers: .*make environments"):
        load(tmp_path, "rollout.environment.python=/bin/false")


def test_it_is_not_started_for_a_trial_that_cannot_be_anyway(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="(?s)model .*nowhere does not exist") as refused:
        load(tmp_path, "rollout.environment.python=/bin/false", f"actor.path={tmp_path / 'nowhere'}")
    assert "verifiers" not in str(refused.value)


def problems(
    folder: Path, *, held_out: bool = True, image: str | None = None, rows: str = "", **rollout: str
) -> list[str]:
    """What is wrong with an environment beside other settings."""
    environment = EnvironmentConfig(id="adding", held_out_args={} if held_out else None)
    (folder / "rows.jsonl").write_text(rows)
    scheduling = default_scheduling()["rollout_worker"].model_copy(update={"container_image": image})
    experiment = AsyncPPOExperiment(
        name="e",
        actor=ActorModelConfig(path=folder),
        rollout=RolloutConfig.model_validate({"environment": environment, **rollout}),
        dataset=DatasetConfig(path=folder / "rows.jsonl" if rows else None),
        evaluation=EvaluationConfig(dataset=DatasetConfig()),
        groups={"rollout_worker": GroupConfig(scheduling=scheduling)},
    )
    return [problem.message for problem in environment_problems(experiment, environment)]


def test_what_contradicts_an_environment_is_refused(tmp_path: Path) -> None:
    [message] = problems(tmp_path)
    assert message.startswith(f"an environment speaks in messages: model {tmp_path} has no chat template")
    add_template(tmp_path)
    assert problems(tmp_path) == []
    assert problems(tmp_path, agent="my.agents:solve") == ["rollout.agent has no effect: the environment adding plays"]
    assert problems(tmp_path, reward="my.rewards:judge") == [
        "rollout.reward has no effect: the environment adding gives the rewards"
    ]
    assert problems(tmp_path, held_out=False) == ["which tasks are held out is not said"]
    [message] = problems(tmp_path, image="image.sif")
    assert message.startswith("rollout.environment.python is not set")
    rows = '{"prompt": "1+1=", "task": {"prompt": "1+1="}}\n{"prompt": "2+1="}\n'
    [message] = problems(tmp_path, rows=rows)
    assert message.endswith("rows.jsonl:2 has no task: with rollout.environment rows are tasks that it has listed")


def test_without_an_environment_the_rows_are_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dataset.path is missing"):
        load(tmp_path, "rollout.environment=null")


def test_settings_for_held_out_tasks_are_put_over_the_others() -> None:
    below = {"taskset": {"count": 3, "seed": 1}, "questions": 2}
    assert merged(below, {"taskset": {"count": 4}}) == {"taskset": {"count": 4, "seed": 1}, "questions": 2}
