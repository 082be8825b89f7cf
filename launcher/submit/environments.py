"""What a trial was planned with: tasks of its environment among its files; and whether all of it is still the same.

submission ──listed_rows──► tasks.jsonl, held-out-tasks.jsonl ──kept_rows──► a resume with other ranks: listed once
resume ──check_inputs──► data sets and models as workers check them
resume ──changed_environment──► what is installed now, beside what the plan says of it
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from corral.experiments.config.base import parts_of
from corral.experiments.datasets.dataset import Dataset
from corral.experiments.errors import ConfigError, ConfigProblem
from corral.experiments.experiment import Experiment
from corral.experiments.inputs.environment_tasks import find_environment
from corral.experiments.plan import RunPlan, check_models
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.worker_specs import DatasetSpec, RolloutWorkerSpec
from corral.scheduling.errors import message_and_hint


def listed_rows(experiment: Experiment, directory: TrialDirectory) -> Mapping[Path, bytes]:
    """What is to be written of tasks, by where."""
    return {_path_of(key, directory): rows for key, rows in experiment.listed_rows.items()}


def kept_rows(directory: TrialDirectory) -> Iterator[str]:
    """Overrides by which the tasks of a trial are those that it began with."""
    for key in ("dataset", "evaluation.dataset"):
        if (path := _path_of(key, directory)).exists():
            yield f"{key}.path={path}"


def _path_of(key: str, directory: TrialDirectory) -> Path:
    return directory.tasks_path if key == "dataset" else directory.held_out_tasks_path


def check_inputs(plan: RunPlan) -> None:
    """Checks what workers check when they start: that data sets are what they were, and models are there.

    Raises:
        ConfigError: with the words of the workers.
    """
    problems = []
    specs = {str(spec.sources): spec for spec in parts_of(plan.workers, DatasetSpec)}
    for spec in specs.values():
        try:
            Dataset.planned(spec)
        except (OSError, ValueError) as error:
            problems.append(ConfigProblem(*message_and_hint(error)))
    try:
        check_models(plan.workers)
    except ValueError as error:
        problems.append(ConfigProblem(*message_and_hint(error)))
    if problems:
        raise ConfigError(problems)


def changed_environment(plan: RunPlan) -> tuple[str, ...]:
    """A warning if what is installed is not what the trial began with.

    Raises:
        ConfigError: if it cannot be loaded any more.
    """
    workers = plan.all_of(RolloutWorkerSpec)
    if not workers or (spec := workers[0].environment) is None or (config := workers[0].rollout.environment) is None:
        return ()
    try:
        found = find_environment(config)
    except ValueError as error:
        message, hint = message_and_hint(error)
        raise ConfigError.of(message, hint=hint, path=("rollout", "environment", "id")) from error
    if found.sha256 == spec.sha256 and dict(found.packages) == spec.packages:
        return ()
    return (
        f"environment {config.id} is not what the trial began with: {_versions(spec.packages)} then, "
        f"{_versions(found.packages)} now; its tasks stay those of {plan.trial.directory.name}/tasks.jsonl",
    )


def _versions(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
