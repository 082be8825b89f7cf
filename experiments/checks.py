"""Checks across fields and against files: parts of an experiment -> ConfigProblems, each with the key to change.

Every check is a function of what it compares; `Experiment.find_problems` says which apply. Lines of the file are filled
in by the loader.
"""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.cluster import ClusterConfig, GroupConfig
from corral.experiments.config.data import DatasetConfig, EvaluationConfig, RowKind
from corral.experiments.config.model import ModelConfig
from corral.experiments.config.rollout import GenerationConfig, RolloutConfig
from corral.experiments.errors import ConfigProblem, KeyPath, display_path, dotted, show_value, split_remedy
from corral.experiments.generation_checks import check_generation_side
from corral.experiments.inputs.dataset_file import DatasetReader
from corral.experiments.inputs.import_paths import check_import_path
from corral.experiments.inputs.model_directory import ModelFacts, inspect_model
from corral.experiments.inputs.parameters import check_lora
from corral.experiments.inputs.tokens import LengthLimits
from corral.experiments.training_checks import check_training_side
from corral.scheduling.allocation import Allocation, parse_allocation
from corral.scheduling.mesh import Mesh
from corral.scheduling.placement import NodeShape, place
from corral.scheduling.scheduling import ExperimentScheduling, TasksGroup
from corral.scheduling.worker_information import WorkerKind

MODEL_CONTEXT = "the model's max_position_embeddings"

_ALLOCATION = ("allocation",)
_MAX_LONG_ROWS = 3  # more of the same kind would only scroll the first ones away
# What the file leaves open, only the cluster can tell.
_ANY_NODE = NodeShape(cpus=1 << 20, gpus=1 << 12, mem_mb=1 << 40)


def check_allocation(
    text: str, *, roles: Iterable[str], generates: bool
) -> tuple[Allocation | None, list[ConfigProblem]]:
    """The allocation, and what this version cannot do of it; None if it is no allocation string at all."""
    try:
        allocation = parse_allocation(text)
    except ValueError as error:
        message, hint = split_remedy(str(error))
        hint = hint or ("for example hf:d1+fsdp:d1" if generates else "for example fsdp:d1")
        return None, [ConfigProblem(message=message, hint=hint, path=_ALLOCATION, shown=text)]
    problems = [
        *check_generation_side(allocation, generates=generates),
        *check_training_side(allocation, roles=tuple(roles)),
    ]
    return allocation, [replace(problem, path=_ALLOCATION, shown=text) for problem in problems]


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
                yield ConfigProblem(message=f"this experiment has no {kind}", hint=hint, path=path)
            continue
        expected = expected_count[kind]
        if group.count is not None and expected is not None and group.count != expected:
            reason = (
                "a trial has one" if kind in ("master_worker", "gserver_manager") else f"the allocation says {expected}"
            )
            yield ConfigProblem(
                message=f"groups.{kind}.count is {group.count}, but {reason}",
                hint=f"remove the count, or {'write 1' if reason.endswith('one') else 'change the allocation'}",
                path=(*path, "count"),
                shown=str(group.count),
            )
        if kind != "generation_server" and group.scheduling is not None and group.scheduling.gpu > 1:
            yield ConfigProblem(
                message=f"a worker drives at most 1 GPU, got {group.scheduling.gpu}",
                hint="raise d in the allocation instead",
                path=(*path, "scheduling", "gpu"),
                shown=str(group.scheduling.gpu),
            )


def check_containers(groups: Mapping[WorkerKind, GroupConfig], cluster: ClusterConfig) -> Iterator[ConfigProblem]:
    """Images that nothing could run, and mounts without an image."""
    for kind, group in groups.items():
        for path, scheduling in (
            (("groups", kind, "scheduling"), group.scheduling),
            (("groups", kind, "elastic", "scheduling"), group.elastic.scheduling if group.elastic else None),
        ):
            if scheduling is None:
                continue
            if scheduling.container_image is not None and cluster.container_runtime is None:
                yield ConfigProblem(
                    message="container_image needs cluster.container_runtime, which is not set",
                    hint="set cluster.container_runtime to apptainer, singularity or pyxis, whichever this site has",
                    path=(*path, "container_image"),
                    shown=scheduling.container_image,
                )
            if scheduling.container_mounts and scheduling.container_image is None:
                yield ConfigProblem(
                    message="container_mounts has no effect without container_image",
                    hint="set container_image, or remove it",
                    path=(*path, "container_mounts"),
                    shown=show_value(scheduling.container_mounts),
                )


def check_placement(scheduling: ExperimentScheduling, cluster: ClusterConfig) -> Iterator[ConfigProblem]:
    """Groups that do not fit the nodes that the configuration describes."""
    shape = cluster.node_shape(_ANY_NODE)
    try:
        place(scheduling, shape, max_nodes=cluster.max_nodes)
    except ValueError as error:
        sizes = {"CPUs": cluster.cpus_per_node, "GPUs": cluster.gpus_per_node, "MB": cluster.mem_per_node}
        size = ", ".join(f"{number} {unit}" for unit, number in sizes.items() if number is not None)
        nearest = "; ".join(_what_fits(scheduling, shape, max_nodes=cluster.max_nodes))
        otherwise = "change the groups' scheduling (gpu: 0 runs on CPUs), the allocation, or the cluster's description"
        yield ConfigProblem(
            message=f"the groups cannot be placed on {cluster.max_nodes or 'any number of'} node(s) of {size}: {error}",
            hint=f"{nearest}; or {otherwise}" if nearest else otherwise,
            path=("cluster",),
        )


def _what_fits(scheduling: ExperimentScheduling, shape: NodeShape, *, max_nodes: int | None) -> Iterator[str]:
    """The nearest numbers with which the groups could be placed; nothing where a single task is too large."""
    try:
        enough = place(scheduling, shape).num_nodes
    except ValueError:
        return
    yield f"{enough} such nodes are enough (cluster.max_nodes)"
    ranks, rollout = scheduling["model_worker"], scheduling.get("rollout_worker")
    follows = rollout is not None and rollout.count == ranks.count
    kinds: tuple[WorkerKind, ...] = ("model_worker", "rollout_worker") if follows else ("model_worker",)
    if count := _most_that_fit(scheduling, kinds, shape, max_nodes=max_nodes):
        also = ", with as many rollout workers," if follows else ""
        yield f"{count} of {ranks.count} model workers{also} fit beside the others"
    servers = scheduling.get("generation_server")
    if servers and (count := _most_that_fit(scheduling, ("generation_server",), shape, max_nodes=max_nodes)):
        yield f"{count} of {servers.count} generation servers fit beside the others"


def _most_that_fit(
    scheduling: ExperimentScheduling, kinds: Sequence[WorkerKind], shape: NodeShape, *, max_nodes: int | None
) -> int:
    """The most tasks that each group of these kinds, which are equally many, may have; 0 if not even one fits."""

    def is_too_many(count: int) -> bool:
        fewer: dict[str, TasksGroup] = {kind: scheduling[kind].model_copy(update={"count": count}) for kind in kinds}
        return not _fits(scheduling.model_copy(update=fewer), shape, max_nodes=max_nodes)

    return bisect.bisect_left(range(1, scheduling[kinds[0]].count), True, key=is_too_many)


def _fits(scheduling: ExperimentScheduling, shape: NodeShape, *, max_nodes: int | None) -> bool:
    try:
        place(scheduling, shape, max_nodes=max_nodes)
    except ValueError:
        return False
    return True


def check_dataset(
    config: DatasetConfig, path: KeyPath, *, kind: RowKind, limits: LengthLimits
) -> tuple[int | None, list[ConfigProblem]]:
    """Rows of a dataset (None if it is broken), and what is wrong with it."""
    reader = DatasetReader(config=config, kind=kind)
    too_long: list[ConfigProblem] = []
    try:
        for row in reader:
            if excess := limits.find_excess(row.prompt, row.answers):
                place = f"{display_path(config.path)}:{row.line}"
                hint = f"shorten or remove the row, or raise {dotted(path)}.max_prompt_tokens and what has to hold it"
                too_long.append(ConfigProblem(message=f"{place}: {excess}", hint=hint))
                if len(too_long) >= _MAX_LONG_ROWS:
                    break
    except ValueError as error:
        message, hint = split_remedy(str(error))
        too_long.append(ConfigProblem(message=message, hint=hint))
    where = (*path, "path")
    problems = [
        replace(problem, path=where, shown=display_path(config.path)) for problem in (*reader.problems, *too_long)
    ]
    return (None if problems else reader.num_rows), problems


def check_batch(
    *, num_rows: int, epochs: int, train_batch_size: int, meshes: Mapping[str, Mesh]
) -> Iterator[ConfigProblem]:
    """A batch that the data never fills, or that leaves ranks without work.

    Args:
        meshes: the ranks of each role; none if the allocation is broken.
    """
    path, shown = ("train_batch_size",), str(train_batch_size)
    if train_batch_size > num_rows * epochs:
        yield ConfigProblem(
            message=f"train_batch_size {train_batch_size} is more than the dataset's {num_rows} rows x {epochs} epochs",
            hint=f"at most {num_rows * epochs} fits; or raise control.total_train_epochs",
            path=path,
            shown=shown,
        )
    too_wide = {role: mesh.dims.dp for role, mesh in meshes.items() if mesh.dims.dp > train_batch_size}
    if too_wide:
        ranks = ", ".join(f"{dp} of {role}" for role, dp in too_wide.items())
        yield ConfigProblem(
            message=f"train_batch_size {train_batch_size} leaves data-parallel ranks without work: there are {ranks}",
            hint=f"at least {max(too_wide.values())}, or at most d{train_batch_size} in the allocation",
            path=path,
            shown=shown,
        )


def check_model(config: ModelConfig, path: KeyPath) -> tuple[ModelFacts | None, list[ConfigProblem]]:
    """What is known of a model on disk, and what is wrong with it."""
    facts, problems = inspect_model(config.path)
    of_path = [replace(problem, path=(*path, "path"), shown=display_path(config.path)) for problem in problems]
    of_lora = [replace(problem, path=(*path, *problem.path)) for problem in check_lora(config)]
    return facts, [*of_path, *of_lora]


def check_vocabulary(
    model: ModelConfig, facts: ModelFacts | None, actor: ModelFacts | None, *, key: str
) -> Iterator[ConfigProblem]:
    """A model beside the actor whose tokens are not the actor's."""
    if actor is not None and facts is not None and actor.vocab_size != facts.vocab_size:
        yield ConfigProblem(
            message=f"{key} has a vocabulary of {facts.vocab_size}, the actor one of {actor.vocab_size}",
            hint="use the model that the actor starts from, or one with the same tokenizer",
            path=(key, "path"),
            shown=str(model.path),
        )


def check_length(
    *, max_prompt_tokens: int, max_new_tokens: int, limit: int | None, limit_name: str, path: KeyPath
) -> Iterator[ConfigProblem]:
    """Prompts and answers that together exceed a limit; `path` is the key of max_new_tokens."""
    needed = max_prompt_tokens + max_new_tokens
    remedy = "use a model with a longer context" if limit_name == MODEL_CONTEXT else f"raise {limit_name}"
    if limit is not None and needed > limit:
        yield ConfigProblem(
            message=(
                f"{max_prompt_tokens} prompt tokens + {max_new_tokens} new tokens = {needed} do not fit "
                f"{limit_name} = {limit}"
            ),
            hint=f"lower max_new_tokens or the dataset's max_prompt_tokens, or {remedy}",
            path=path,
        )


def check_evaluation(
    evaluation: EvaluationConfig, facts: ModelFacts | None, *, kind: RowKind, limits: LengthLimits, answers: bool
) -> Iterator[ConfigProblem]:
    """Held-out rows that are broken or too long for the model.

    Args:
        limits: of the rows; those of the training data, but for the prompts.
        answers: whether the model answers the prompts.
    """
    limits = replace(limits, max_prompt_tokens=evaluation.dataset.max_prompt_tokens)
    yield from check_dataset(evaluation.dataset, ("evaluation", "dataset"), kind=kind, limits=limits)[1]
    if facts is not None and answers:
        yield from check_length(
            max_prompt_tokens=evaluation.dataset.max_prompt_tokens,
            max_new_tokens=evaluation.max_new_tokens,
            limit=facts.max_position_embeddings,
            limit_name=MODEL_CONTEXT,
            path=("evaluation", "max_new_tokens"),
        )


def check_ppo(
    ppo: PPOConfig, *, has_ref: bool, train_batch_size: int, dp: int, has_critic: bool = False
) -> Iterator[ConfigProblem]:
    """Settings of the algorithm that contradict each other, the rest of the experiment, or the ranks that train.

    Args:
        dp: data-parallel ranks of the actor, each of which cuts its own answers into mini-batches.
    """
    if ppo.kl.coef > 0.0 and not has_ref:
        yield ConfigProblem(
            message=f"ppo.kl.coef {ppo.kl.coef} needs a reference model, and there is none",
            hint="give ref.path (the model that the actor starts from), or set ppo.kl.coef: 0",
            path=("ppo", "kl", "coef"),
            shown=str(ppo.kl.coef),
        )
    if ppo.needs_critic and not has_critic:
        yield ConfigProblem(
            message=f"ppo.advantage {ppo.advantage} needs a critic, and there is none",
            hint="give a critic, or set ppo.advantage: group_relative",
            path=("ppo", "advantage"),
            shown=ppo.advantage,
        )
    if ppo.compares_answers and ppo.group_size < 2:
        yield ConfigProblem(
            message=f"{ppo.advantage} advantages compare the answers to one prompt: with group_size 1 they are all 0",
            hint="ppo.group_size: 8 is usual, 2 the least",
            path=("ppo", "group_size"),
            shown=str(ppo.group_size),
        )
    answers = train_batch_size * ppo.group_size // dp
    if ppo.n_minibatches > answers >= 1:
        prompts = -(-ppo.n_minibatches * dp // ppo.group_size)
        yield ConfigProblem(
            message=(
                f"ppo.n_minibatches {ppo.n_minibatches} is more than the answers of a data-parallel rank: "
                f"{train_batch_size} prompts x {ppo.group_size} answers / {dp} ranks = {answers}"
            ),
            hint=f"at most {answers}, or raise train_batch_size to at least {prompts}",
            path=("ppo", "n_minibatches"),
            shown=str(ppo.n_minibatches),
        )
    for name, import_path in (("loss", ppo.loss), ("advantage", ppo.advantage)):
        if ":" in import_path:
            yield from check_import(("ppo", name), import_path)


def check_concurrency(rollout: RolloutConfig, *, train_batch_size: int) -> Iterator[ConfigProblem]:
    """More prompts in flight than the staleness bound ever admits."""
    most = (rollout.max_head_offpolicyness + 1) * train_batch_size
    if rollout.max_concurrent_rollouts is not None and rollout.max_concurrent_rollouts > most:
        yield ConfigProblem(
            message=(
                f"rollout.max_concurrent_rollouts {rollout.max_concurrent_rollouts} can never be reached: "
                f"the staleness bound admits (max_head_offpolicyness {rollout.max_head_offpolicyness} + 1) "
                f"x train_batch_size {train_batch_size} = {most}"
            ),
            hint=f"at most {most}, or leave it out; raise max_head_offpolicyness for more",
            path=("rollout", "max_concurrent_rollouts"),
            shown=str(rollout.max_concurrent_rollouts),
        )


def check_imports(rollout: GenerationConfig) -> Iterator[ConfigProblem]:
    """Agents and rewards that do not exist."""
    if isinstance(rollout, RolloutConfig):
        yield from check_import(("rollout", "agent"), rollout.agent, must_be_async=True)
    yield from check_import(("rollout", "reward"), rollout.reward)


def check_import(path: KeyPath, import_path: str, *, must_be_async: bool = False) -> Iterator[ConfigProblem]:
    """What is wrong with the import path at this key."""
    problem = check_import_path(import_path, must_be_async=must_be_async)
    if problem is not None:
        yield replace(problem, message=f"{dotted(path)}: {problem.message}", path=path, shown=import_path)
