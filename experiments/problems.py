"""What is wrong with an experiment beyond single fields: Experiment -> ConfigProblems, each with the key to change.

allocation ──► layouts of models, groups on nodes        models, trackers ──► what is there on this machine
dataset ─────► rows, batches, held-out rows              find_own_problems ──► what only its kind can have
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec

from corral.experiments.checks.data import MODEL_CONTEXT, check_dataset, check_length
from corral.experiments.checks.placement import ANY_NODE, place_groups
from corral.experiments.checks.training import check_layouts
from corral.experiments.config.cluster import ClusterConfig, GroupConfig
from corral.experiments.config.data import EvaluationConfig
from corral.experiments.config.rollout import RewardConfig
from corral.experiments.config.tracking import PACKAGE_BY_TRACKER, TrackingConfig
from corral.experiments.errors import (
    ConfigError,
    ConfigProblem,
    KeyPath,
    UnsatisfiableError,
    did_you_mean,
)
from corral.experiments.experiment import Experiment
from corral.experiments.inputs.model_directory import context_length, inspect_model, model_sizes
from corral.experiments.inputs.parameters import check_lora
from corral.scheduling.errors import message_and_hint
from corral.scheduling.worker_information import WorkerKind

# Checks of groups of workers: as many as the allocation says, images that can run, nodes that they fit on.

_LEAST_MEM_MB = 200  # a worker without torch has 150 MB once it has imported its modules


def check_groups(
    groups: Mapping[WorkerKind, GroupConfig], expected_count: Mapping[WorkerKind, int | None]
) -> Iterator[ConfigProblem]:
    """Counts that contradict the allocation, and settings of groups that nobody would read.

    Args:
        groups: what the experiment says.
        expected_count: by kind that the experiment has; None where the user may choose.
    """
    for kind, group in groups.items():
        path: KeyPath = ("groups", kind)
        if kind not in expected_count:
            if group.model_fields_set:
                hint = f"remove it; there are {', '.join(expected_count)}"
                yield ConfigProblem(f"this experiment has no {kind}", hint, path=path)
            continue
        expected = expected_count[kind]
        if group.count is not None and expected is not None and group.count != expected:
            reason = (
                "a trial has one" if kind in ("master_worker", "gserver_manager") else f"the allocation says {expected}"
            )
            yield ConfigProblem(
                f"groups.{kind}.count is {group.count}, but {reason}",
                f"remove the count, or {'write 1' if reason.endswith('one') else 'change the allocation'}",
                path=(*path, "count"),
            )
        for key, scheduling in group.given_schedulings():
            if scheduling.mem < _LEAST_MEM_MB:
                yield ConfigProblem(
                    f"{scheduling.mem} MB of memory are too few for any worker: Python and its packages take more",
                    f"a number without a unit is in MB; did you mean {scheduling.mem}G?",
                    path=(*path, *key, "mem"),
                )
        if kind != "generation_server" and group.scheduling is not None and group.scheduling.gpu > 1:
            yield ConfigProblem(
                f"a worker drives at most 1 GPU, got {group.scheduling.gpu}",
                "raise d in the allocation instead",
                path=(*path, "scheduling", "gpu"),
            )


def check_containers(groups: Mapping[WorkerKind, GroupConfig], cluster: ClusterConfig) -> Iterator[ConfigProblem]:
    """Images that nothing could run, and mounts without an image."""
    for kind, group in groups.items():
        for key, scheduling in group.given_schedulings():
            path: KeyPath = ("groups", kind, *key)
            if scheduling.container_image is not None and cluster.container_runtime is None:
                yield ConfigProblem(
                    "container_image needs cluster.container_runtime, which is not set",
                    "set cluster.container_runtime to apptainer, singularity or pyxis, whichever this site has",
                    path=(*path, "container_image"),
                )
            if scheduling.container_mounts and scheduling.container_image is None:
                yield ConfigProblem(
                    "container_mounts has no effect without container_image",
                    "set container_image, or remove it",
                    path=(*path, "container_mounts"),
                )


def find_problems(experiment: Experiment) -> Iterator[ConfigProblem]:
    """All of it; reads the dataset and looks at the models' folders.

    Where a program of seconds has to be asked for the rows, it is not asked for a trial that cannot be anyway.
    """
    seen_at_once = [
        *(experiment.allocation_problems or _of_groups(experiment)),
        *_of_models(experiment),
        *_of_trackers(experiment.tracking),
        *_of_samplers(experiment),
    ]
    yield from seen_at_once
    if experiment.asks_for_rows and not all(problem.is_of_running for problem in seen_at_once):
        return
    dataset = experiment.checked_dataset
    yield from dataset.problems
    yield from _of_template_arguments(experiment)
    yield from experiment.find_own_problems()
    if dataset.num_rows is not None:
        yield from _of_batch(experiment, dataset.num_rows)
    try:
        evaluation = experiment.located_evaluation
    except ConfigError as error:
        yield from error.problems
        return
    if evaluation is not None:
        yield from _of_evaluation(experiment, evaluation)


def _of_groups(experiment: Experiment) -> Iterator[ConfigProblem]:
    """Models that the allocation cannot divide, and workers that no node could hold."""
    models, key_of = experiment.models, experiment.key_of
    yield from check_layouts(experiment.parsed_allocation, experiment.meshes, models, key_of=key_of)
    problems = [
        *check_groups(experiment.groups, experiment.expected_counts),
        *check_containers(experiment.groups, experiment.cluster),
    ]
    yield from problems
    if not problems:
        cluster = experiment.cluster
        try:
            place_groups(experiment.scheduling_setup(), cluster.node_shape(ANY_NODE), max_nodes=cluster.max_nodes)
        except UnsatisfiableError as error:
            yield from error.problems


def _of_models(experiment: Experiment) -> Iterator[ConfigProblem]:
    """What is wrong with models on disk and their adapters, and models that do not read the first one's tokens."""
    actors = model_sizes(experiment.first_model.path).get("vocab_size")
    for role, model in experiment.models.items():
        key = experiment.key_of(role)
        yield from (replace(problem, path=(key, "path")) for problem in inspect_model(model.path))
        yield from (replace(problem, path=(key, *problem.path)) for problem in check_lora(model))
        own = model_sizes(model.path).get("vocab_size")
        if role in experiment.beside_first and None not in (own, actors) and own != actors:
            yield ConfigProblem(
                f"{key} has a vocabulary of {own}, the actor one of {actors}",
                "use the model that the actor starts from, or one with the same tokenizer",
                path=(key, "path"),
            )


def _of_trackers(tracking: TrackingConfig) -> Iterator[ConfigProblem]:
    """Trackers whose packages are not there."""
    for name in tracking.to:
        package = PACKAGE_BY_TRACKER.get(name)
        if package is not None and find_spec(package) is None:
            yield ConfigProblem(
                f"the tracker {name} needs the package {package}, which is not installed here",
                f"pip install 'corral-rl[{name}]', or remove it",
                path=("tracking", "to"),
                is_of_running=True,
            )


def _of_samplers(experiment: Experiment) -> Iterator[ConfigProblem]:
    """A sampler where nothing comes from rewards of rollout workers."""
    if experiment.dataset.sampler is not None and not experiment.generates:
        yield ConfigProblem(
            "dataset.sampler goes by the rewards of rollout workers, and this experiment has none",
            "remove it, or use experiment: async_ppo",
            path=("dataset", "sampler"),
        )
    if experiment.evaluation is not None and experiment.evaluation.dataset.sampler is not None:
        yield ConfigProblem(
            "held-out rows are all looked at each time, and none is drawn",
            "remove evaluation.dataset.sampler",
            path=("evaluation", "dataset", "sampler"),
        )


def _of_batch(experiment: Experiment, num_rows: int) -> Iterator[ConfigProblem]:
    """A batch that the data never fills, or that leaves ranks without work."""
    epochs, train_batch_size = experiment.control.total_train_epochs, experiment.train_batch_size
    path = ("train_batch_size",)
    if train_batch_size > num_rows * epochs:
        yield ConfigProblem(
            f"train_batch_size {train_batch_size} is more than the dataset's {num_rows} rows x {epochs} epochs",
            f"at most {num_rows * epochs} fits; or raise control.total_train_epochs",
            path=path,
        )
    too_wide = {role: mesh.dims.dp for role, mesh in experiment.known_meshes.items() if mesh.dims.dp > train_batch_size}
    if too_wide:
        ranks = ", ".join(f"{dp} of {role}" for role, dp in too_wide.items())
        yield ConfigProblem(
            f"train_batch_size {train_batch_size} leaves data-parallel ranks without work: there are {ranks}",
            f"at least {max(too_wide.values())}, or at most d{train_batch_size} in the allocation",
            path=path,
        )


def _of_template_arguments(experiment: Experiment) -> Iterator[ConfigProblem]:
    """Arguments that the model's chat template does not take, and held-out rows with others than the trial."""
    given, key = experiment.dataset.chat_template_kwargs, "chat_template_kwargs"
    if experiment.evaluation is not None and experiment.evaluation.dataset.chat_template_kwargs not in ({}, given):
        rule, hint = f"evaluation.dataset.{key} differs from dataset.{key}", "held-out rows take those of dataset"
        yield ConfigProblem(rule, f"{hint}; remove it", path=("evaluation", "dataset", key))
    if given:
        try:
            assert experiment.length_limits().prompts.chat
        except ValueError as error:
            yield ConfigProblem(*message_and_hint(error), path=("dataset", key))


def _of_evaluation(experiment: Experiment, evaluation: EvaluationConfig) -> Iterator[ConfigProblem]:
    """Held-out rows that are broken or too long for the model, and answers that nobody can give."""
    kind, listed = experiment.held_out_kind, experiment.listed_rows.get("evaluation.dataset")
    limits = replace(experiment.length_limits(), max_prompt_tokens=evaluation.dataset.max_prompt_tokens)
    for name, config in evaluation.datasets.items():
        path: KeyPath = ("evaluation", "more", name) if name else ("evaluation", "dataset", "path")
        rows = None if name else listed
        found = check_dataset(config, ("evaluation", "dataset"), kind=kind, limits=limits, content=rows)
        yield from (replace(problem, path=path) for problem in found.problems)
        if found.warnings:
            # An accuracy is one of all problems, or cannot be compared with that of somebody else.
            yield ConfigProblem(
                f"held-out rows have to be usable all of them: {found.warnings[0]}",
                "shorten or remove them, or raise evaluation.dataset.max_prompt_tokens and what has to hold it",
                path=path,
            )
    parts = getattr(experiment, "rollout", RewardConfig()).reward
    if isinstance(evaluation.correct, str) and evaluation.correct not in parts:
        yield ConfigProblem(
            f"evaluation.correct {evaluation.correct!r} is no part of rollout.reward, which has: {', '.join(parts)}",
            "name a part, or a number that right answers have at least",
            path=("evaluation", "correct"),
        )
    if experiment.generates and evaluation.best is not None and evaluation.best not in evaluation.metrics:
        yield ConfigProblem(
            f"an evaluation has no number {evaluation.best!r}",
            did_you_mean(evaluation.best, evaluation.metrics, f"there are {', '.join(evaluation.metrics)}"),
            path=("evaluation", "best"),
        )
    if kind in ("prompts", "answers"):
        path = ("evaluation", "sampling", "max_new_tokens")
        bounds = {MODEL_CONTEXT: context_length(experiment.first_model.path)}
        yield from check_length(evaluation.dataset, evaluation.sampling, bounds, path)
