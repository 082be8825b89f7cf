"""Checks of `rollout.environment`: what it takes the place of, and what its rows have to have."""

from collections.abc import Iterator
from pathlib import Path

from corral.experiments.config.data import DatasetConfig, EvaluationConfig
from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.config.rollout import RolloutConfig
from corral.experiments.datasets.dataset import Dataset, Look
from corral.experiments.errors import ConfigProblem, KeyPath
from corral.scheduling.errors import message_and_hint


def check_environment(
    rollout: RolloutConfig,
    environment: EnvironmentConfig,
    dataset: DatasetConfig,
    evaluation: EvaluationConfig | None,
    *,
    model: Path,
    is_in_container: bool,
) -> Iterator[ConfigProblem]:
    """Settings beside an environment that contradict it, files that hold no tasks, a model that nobody can talk to.

    Args:
        model: folder of what the environment talks to.
        is_in_container: whether rollout workers start in an image.
    """
    for key, whose in (("agent", "plays"), ("agent_settings", "plays"), ("reward", "gives the rewards")):
        if key in rollout.model_fields_set:
            yield ConfigProblem(
                f"rollout.{key} has no effect: the environment {environment.id} {whose}",
                f"remove it, or rollout.environment to use rollout.{key}",
                path=("rollout", key),
            )
    if is_in_container and environment.python is None:
        yield ConfigProblem(
            "rollout.environment.python is not set, and rollout workers start in a container",
            "give the path of a Python that is there in that image and here, where tasks are listed",
            path=("rollout", "environment"),
        )
    from corral.experiments.prompts.chat_template import ChatTemplate  # only who has an environment pays for Jinja

    try:
        ChatTemplate.of_model(model)
    except ValueError as error:
        message, hint = message_and_hint(error)
        yield ConfigProblem(f"an environment speaks in messages: {message}", hint, path=("actor", "path"))
    yield from check_tasks(dataset, ("dataset", "path"))
    if evaluation is None:
        if environment.held_out_args is not None:
            yield ConfigProblem(
                "rollout.environment.held_out_args has no effect: nothing is held out",
                "add `evaluation`, or remove it",
                path=("rollout", "environment", "held_out_args"),
            )
        return
    yield from check_tasks(evaluation.dataset, ("evaluation", "dataset", "path"))
    has_args, has_file = environment.held_out_args is not None, evaluation.dataset.is_named
    if has_args and has_file:
        yield ConfigProblem(
            "rollout.environment.held_out_args and evaluation.dataset.path both say which tasks are held out",
            "remove one of them",
            path=("evaluation", "dataset", "path"),
        )
    if not has_args and not has_file:
        yield ConfigProblem(
            "which tasks are held out is not said",
            "set rollout.environment.held_out_args, such as {taskset: {split: test}}; or name in "
            "evaluation.dataset.path a file of tasks: lines of the tasks.jsonl of another trial",
            path=("evaluation", "dataset"),
        )


def check_tasks(dataset: DatasetConfig, path: KeyPath) -> Iterator[ConfigProblem]:
    """A file of rows that no environment has listed."""
    if not dataset.is_named:
        return
    try:
        rows = [row for _, _, row in Look(Dataset.open(dataset, kind="prompts"))]
    except ValueError:
        return  # the checks of data say so
    if without := [row.place for row in rows if not isinstance(row.fields.get("task"), dict)]:
        yield ConfigProblem(
            f"{without[0]} has no task: with rollout.environment rows are tasks that it has listed",
            "remove the path, and they are listed at submission; or name the tasks.jsonl of another trial",
            path=path,
        )
