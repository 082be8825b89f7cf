"""Errors of an experiment beyond single classes: Experiment -> ConfigProblems, each with the key to change.

allocation ──► layouts of models, groups on nodes        models, trackers ──► what is there on this machine
dataset ─────► rows, batches, held-out rows              find_own_problems ──► what a class of the user's own adds

a policy:    algorithm ──► reference, critic, teachers that it needs; mini-batches of what each rank has
             teachers ───► the actor's tokens, and the sources of rows
             the user's own interfaces, losses, advantages ──► keys that a call makes
async_ppo:   environment, episodes, judge, servers

What one configuration class knows, its validators check.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.checks.data import (
    MODEL_CONTEXT,
    check_columns,
    check_dataset,
    check_field,
    check_length,
    check_tasks,
)
from corral.experiments.checks.generation import (
    check_admission,
    check_backend_settings,
    check_embedded_model,
    check_heads,
    check_judge,
    check_mixture,
    check_parallel_flags,
    check_server_gpus,
    check_sglang,
)
from corral.experiments.checks.placement import ANY_NODE, place_groups
from corral.experiments.checks.training import check_layouts
from corral.experiments.config.cluster import ClusterConfig, GroupConfig
from corral.experiments.config.data import EvaluationConfig
from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.config.rollout import RewardConfig
from corral.experiments.config.tracking import PACKAGE_BY_TRACKER, TrackingConfig
from corral.experiments.errors import (
    ConfigError,
    ConfigProblem,
    KeyPath,
    UnsatisfiableError,
    did_you_mean,
    dotted,
)
from corral.experiments.experiment import Experiment
from corral.experiments.inputs.model_directory import context_length, inspect_model, model_sizes, read_vocabulary
from corral.experiments.inputs.parameters import check_lora
from corral.experiments.policy import PolicyExperiment
from corral.experiments.ppo import PPOExperiment
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.scheduling.allocation import EngineAllocation
from corral.scheduling.errors import message_and_hint
from corral.scheduling.model_function_call import CallType
from corral.scheduling.worker_information import WorkerKind

_SHOWS_TOOLS = ("corral.agents:tools", "corral.workers.agents.shipped:tools")

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
    if isinstance(experiment, PolicyExperiment):
        yield from _of_policy(experiment)
    if isinstance(experiment, AsyncPPOExperiment):
        yield from _of_async_ppo(experiment)
    if isinstance(experiment, PPOExperiment):
        yield from check_embedded_model(experiment.actor.path, remedy="take async_ppo, whose servers may be SGLang's")
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


def _of_policy(experiment: PolicyExperiment) -> Iterator[ConfigProblem]:
    """Contradictions between the algorithm, its models, and its rows."""
    yield from _of_ppo(experiment)
    served = {
        f"rollout.teachers.{name}" if name else "rollout.teacher": one.path
        for name, one in experiment.rollout.served_teachers.items()
    }
    yield from _of_teachers(experiment, served)
    if served:
        yield from _of_served_teachers(experiment, ", ".join(served))
    if experiment.dataset.has_teacher_prompts and experiment.rollout.makes_episodes:
        yield ConfigProblem(
            "columns.teacher_prompt takes the place of the prompt, and what agents and environments make may begin "
            "with something else",
            "remove it, or answer in a single turn: without rollout.agent and rollout.environment",
            path=("dataset",),
        )
    yield from check_columns(experiment.dataset, experiment.checked_dataset)
    if experiment.rollout.asks_judge != (getattr(experiment.rollout, "judge", None) is not None):
        yield ConfigProblem(
            "a reward with the settings {url: trial} asks rollout.judge of async_ppo; only one of both is there",
            "name the judge's model in rollout.judge.path, or an endpoint in the reward's settings",
            path=("rollout", "reward"),
        )
    yield from _of_keys(experiment)
    path = ("rollout", "sampling", "max_new_tokens")
    yield from check_length(experiment.dataset, experiment.rollout.sampling, experiment.length_bounds(), path)


def _of_ppo(experiment: PolicyExperiment) -> Iterator[ConfigProblem]:
    """Settings of the algorithm that contradict each other, the rest of the experiment, or the ranks that train."""
    ppo = experiment.ppo
    ranks = [mesh.dims.dp for role, mesh in experiment.known_meshes.items() if role in ("actor", "critic")]
    dp = max(ranks, default=1)  # each cuts its own answers into mini-batches
    if ppo.kl.coef > 0.0 and experiment.ref is None:
        yield ConfigProblem(
            f"ppo.kl.coef {ppo.kl.coef} needs a reference model, and there is none",
            "give ref.path (the model that the actor starts from), or set ppo.kl.coef: 0",
            path=("ppo", "kl", "coef"),
        )
    if ppo.distillation.coef > 0.0 and not experiment.has_teacher:
        yield ConfigProblem(
            f"ppo.distillation.coef {ppo.distillation.coef} needs a teacher, and there is none",
            "give teacher.path (a better model with the actor's tokenizer), or set ppo.distillation.coef: 0",
            path=("ppo", "distillation", "coef"),
        )
    if ppo.needs_critic and experiment.critic is None:
        yield ConfigProblem(
            f"ppo.advantage {ppo.advantage} needs a critic, and there is none",
            "give a critic, or set ppo.advantage: group_relative",
            path=("ppo", "advantage"),
        )
    answers = experiment.train_batch_size * ppo.group_size // dp
    if ppo.n_minibatches > answers >= 1:
        prompts = -(-ppo.n_minibatches * dp // ppo.group_size)
        yield ConfigProblem(
            f"ppo.n_minibatches {ppo.n_minibatches} is more than the answers of a data-parallel rank: "
            f"{experiment.train_batch_size} prompts x {ppo.group_size} answers / {dp} ranks = {answers}",
            f"at most {answers}, or raise train_batch_size to at least {prompts}",
            path=("ppo", "n_minibatches"),
        )


def _of_teachers(experiment: PolicyExperiment, served: Mapping[str, Path | None]) -> Iterator[ConfigProblem]:
    """Teachers that do not read what the actor writes, or are not there for every row.

    Args:
        served: the directories of those outside of the trial, as far as they are known, by the key of each.
    """
    own = {experiment.key_of(role): experiment.models[role].path for role in experiment.teacher_roles}
    teachers, top_k = {**own, **served}, experiment.ppo.distillation.top_k
    names, sources = experiment.taught_sources, experiment.dataset.sources
    for key, path in teachers.items():
        if path is not None:
            yield from _of_one_teacher(path, experiment.actor.path, key=key, top_k=top_k)
    if teachers and top_k is not None and experiment.actor.shared_prompts != "off":
        yield ConfigProblem(
            "ppo.distillation.top_k asks each answer for tokens of its own, and with actor.shared_prompts answers "
            "that begin alike are asked once",
            "set actor.shared_prompts: off",
            path=("actor", "shared_prompts"),
        )
    if len(teachers) > max(1, len(set(names))):
        yield ConfigProblem(
            f"{' and '.join(teachers)} say who is learned from on the same rows",
            "keep one of all rows, or one of each source in `teachers` or `rollout.teachers`",
            path=("teacher",),
        )
    if names and set(names) != sources.keys():
        yield ConfigProblem(
            f"teachers are named {', '.join(names)}, and dataset.sources {', '.join(sources) or 'nothing'}: each "
            "source has one",
            "name teachers as the sources, or give one `teacher` of all rows",
            path=("teachers",),
        )


def _of_one_teacher(teacher: Path, actor: Path, *, key: str, top_k: int | None) -> Iterator[ConfigProblem]:
    """A teacher that does not read what the actor writes; it may know more tokens, and have more rows to fill up.

    Args:
        top_k: how many of its own tokens it tells the actor, which then has to know all of them.
    """
    own, actors = (read_vocabulary(one) for one in (teacher, actor))
    if own is not None and actors is not None and (others := sorted(dict(actors.items() - own.items()))):
        yield ConfigProblem(
            f"{key} has another tokenizer than the actor: {len(others)} of the actor's {len(actors)} tokens are others "
            f"to it, such as {others[0]!r}",
            "take a teacher of the actor's family, with the same tokenizer: it scores the actor's tokens one by one",
            path=(key, "path"),
        )
    rows, needed = (model_sizes(one).get("vocab_size") for one in (teacher, actor))
    if rows is not None and needed is not None and rows < needed:
        yield ConfigProblem(
            f"{key} has a vocabulary of {rows}, the actor one of {needed}: it cannot read all that the actor may write",
            "take a teacher with at least as many rows of embeddings",
            path=(key, "path"),
        )
    elif rows != needed and top_k is not None and rows is not None and needed is not None:
        yield ConfigProblem(
            f"{key} has a vocabulary of {rows}, the actor one of {needed}: it may tell of tokens that the actor lacks",
            "take a teacher with as many rows of embeddings, or leave out ppo.distillation.top_k",
            path=(key, "path"),
        )
    elif needed is not None and top_k is not None and top_k > needed:
        yield ConfigProblem(
            f"ppo.distillation.top_k {top_k} is more than the vocabulary of {needed}",
            f"at most {needed}; 20 to 100 are usual",
            path=("ppo", "distillation", "top_k"),
        )


def _of_served_teachers(experiment: PolicyExperiment, keys: str) -> Iterator[ConfigProblem]:
    """Settings that teachers outside of the trial do not support."""
    temperature = experiment.rollout.sampling.temperature
    if temperature != 1.0:
        yield ConfigProblem(
            f"{keys} says log-probabilities at temperature 1, as servers give those of prompts, and answers "
            f"are sampled at {temperature:g}",
            "sample at 1, or take a `teacher` of the trial",
            path=("rollout", "sampling", "temperature"),
        )
    if experiment.dataset.names_temperatures:
        yield ConfigProblem(
            f"{keys} says log-probabilities at temperature 1, and rows say at which answers are sampled",
            "leave out columns.temperature of dataset, or take a `teacher` of the trial",
            path=("dataset",),
        )
    if experiment.ppo.distillation.top_k is not None:
        yield ConfigProblem(
            f"{keys} says how likely given tokens are, and cannot name others by their ids",
            "leave out ppo.distillation.top_k, or take a `teacher` of the trial",
            path=("ppo", "distillation", "top_k"),
        )


def _of_keys(experiment: PolicyExperiment) -> Iterator[ConfigProblem]:
    """Interfaces, losses and advantages of the user's own that read what nobody makes."""
    made = {*experiment.trajectory_keys, *(key for call in experiment.training_calls() for key in call.output_keys)}
    made |= {"rewards", *experiment.declared_names(experiment.ppo.advantage, "outputs")}
    for path, import_path, call_type in (
        (("actor", "interface"), experiment.actor.implementation, CallType.TRAIN_STEP),
        (("ppo", "advantage"), experiment.ppo.advantage, None),
        (("ppo", "loss"), experiment.ppo.loss, None),
    ):
        if missing := [key for key in experiment.declared_names(import_path, "inputs", call_type) if key not in made]:
            yield ConfigProblem(
                f"{dotted(path)} {import_path} reads {', '.join(missing)}, and no call makes that",
                "let a reward_model.interface or a call of your own make it: see docs/customize.md",
                path=path,
            )


def _of_async_ppo(experiment: AsyncPPOExperiment) -> Iterator[ConfigProblem]:
    """Episodes, the judge, groups, lengths and servers that do not go with the rest of the experiment."""
    if experiment.rollout.environment is not None:
        yield from environment_problems(experiment, experiment.rollout.environment)
    shown, path = experiment.rollout.demonstrations, ("rollout", "demonstrations")
    yield from check_field(shown, "an answer to show", experiment.checked_dataset, path)
    yield from check_admission(experiment.rollout, train_batch_size=experiment.train_batch_size)
    yield from check_judge(experiment.rollout.judge, experiment.parsed_allocation)
    yield from _of_episodes(experiment) if experiment.rollout.makes_episodes else ()
    if experiment.rollout.agent in _SHOWS_TOOLS and not experiment.rollout.agent_settings.get("call"):
        yield from _of_shown_tools(experiment.length_limits().prompts)
    advantage = experiment.ppo.advantage
    if experiment.rollout.drop_uniform_groups and advantage in ("gae", "rewards_to_go", "none"):
        yield ConfigProblem(
            f"rollout.drop_uniform_groups drops prompts that teach ppo.advantage: {advantage} something: "
            "only where answers are compared with each other are equal rewards nothing",
            "set it to false, or ppo.advantage to group_relative or rloo",
            path=("rollout", "drop_uniform_groups"),
        )
    if experiment.evaluation is not None:
        key, bounds = ("evaluation", "sampling", "max_new_tokens"), experiment.engine_bounds
        yield from check_length(experiment.evaluation.dataset, experiment.evaluation.sampling, bounds, key)
    if experiment.weights.encoding == "lora" and experiment.actor.lora is None:
        yield ConfigProblem(
            "weights.transport: lora sends adapters, and the actor has none",
            "give actor.lora, such as {rank: 16, alpha: 32}, or set weights.transport: shared_memory",
            path=("weights", "transport"),
        )
    if (engine := experiment.parsed_allocation.generation) is not None:
        yield from _of_servers(experiment, engine)


def environment_problems(experiment: AsyncPPOExperiment, environment: EnvironmentConfig) -> Iterator[ConfigProblem]:
    """Files that hold no tasks, held-out tasks that nothing names, a model that nobody can talk to."""
    for key, what in (("agent", "plays"), ("agent_settings", "plays"), ("reward", "gives the rewards")):
        if key in experiment.rollout.model_fields_set:  # a plan has them all, with their defaults
            yield ConfigProblem(
                f"rollout.{key} has no effect: the environment {environment.id} {what}",
                f"remove it, or rollout.environment to use rollout.{key}",
                path=("rollout", key),
            )
    dataset, evaluation = experiment.dataset, experiment.evaluation
    group = experiment.groups.get("rollout_worker", GroupConfig()).scheduling
    if group is not None and group.container_image is not None and environment.python is None:
        yield ConfigProblem(
            "rollout.environment.python is not set, and rollout workers start in a container",
            "give the path of a Python that is there in that image and here, where tasks are listed",
            path=("rollout", "environment"),
        )
    from corral.experiments.prompts.chat_template import ChatTemplate  # only who has an environment pays for Jinja

    try:
        ChatTemplate.of_model(experiment.actor.path)
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


def _of_episodes(experiment: AsyncPPOExperiment) -> Iterator[ConfigProblem]:
    """Sequences of episodes that do not fit what all that read or make them can take."""
    path, longest = ("rollout", "episode", "max_tokens"), experiment.rollout.episode.max_tokens
    if longest is None:
        return
    for name, limit in experiment.episode_bounds().items():
        if longest > limit:
            yield ConfigProblem(
                f"a sequence of {longest} tokens does not fit {name} = {limit}",
                f"lower rollout.episode.max_tokens to {limit}, or leave it out: it is then as long as all can take",
                path=path,
            )
    if longest <= experiment.dataset.max_prompt_tokens:
        yield ConfigProblem(
            f"a prompt of {experiment.dataset.max_prompt_tokens} tokens leaves no room for an answer in {longest}",
            "raise rollout.episode.max_tokens, or lower dataset.max_prompt_tokens",
            path=path,
        )


def _of_servers(experiment: AsyncPPOExperiment, engine: EngineAllocation) -> Iterator[ConfigProblem]:
    """Servers that the allocation or the model contradicts."""
    group, gpus = experiment.groups.get("generation_server", GroupConfig()), engine.dims.tp
    uses_sglang = engine.backend == "sglang"
    yield from check_sglang(
        experiment.sglang,
        is_used=uses_sglang,
        is_in_container=group.scheduling is not None and group.scheduling.container_image is not None,
    )
    yield from check_backend_settings(experiment.engine, experiment.weights, backend=engine.backend)
    yield from check_server_gpus(group, gpus_per_server=gpus)
    if uses_sglang:
        has_gpus = group.scheduling is None or group.scheduling.gpu > 0
        yield from check_parallel_flags(experiment.sglang.flags, gpus_per_server=gpus, has_gpus=has_gpus)
        yield from check_heads(experiment.actor.path, experiment.sglang.flags, gpus_per_server=gpus)
        yield from check_mixture(experiment.actor.path)
        samplings = {
            "rollout": experiment.rollout.sampling,
            "evaluation": experiment.evaluation and experiment.evaluation.sampling,
        }
        for part, sampling in samplings.items():
            if sampling and sampling.min_p > 0.0 and experiment.sglang.flags.get("enable-deterministic-inference"):
                yield ConfigProblem(
                    f"{part}.sampling.min_p {sampling.min_p:g}: SGLang's deterministic inference draws by seeds, "
                    "and ends where min_p is asked of it",
                    "use top_p, or remove sglang.flags.enable-deterministic-inference",
                    path=(part, "sampling", "min_p"),
                )
    elif engine.backend == "hf":
        yield from check_embedded_model(experiment.actor.path, remedy="use SGLang: sglang:d1 in place of hf:d1")


def _of_shown_tools(prompts: PromptEncoder) -> Iterator[ConfigProblem]:
    """A model whose chat template cannot show it the tools of the agent `tools`, or cannot write calls of them."""
    hint = "set rollout.agent_settings.call to the pattern of a call in text, or use a model whose template has tools"
    try:
        lacking = prompts.chat.lacks_for_tools
    except ValueError as error:
        lacking = message_and_hint(error)[0]
    if lacking:
        yield ConfigProblem(f"the agent calls tools: {lacking}", hint, path=("rollout", "agent_settings"))
