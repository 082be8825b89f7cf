"""Checks of rows, batches and models: what the files hold, and whether lengths and vocabularies go together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from corral.experiments.config.data import DatasetConfig, EvaluationConfig, RowKind
from corral.experiments.config.model import ModelConfig
from corral.experiments.errors import ConfigProblem, KeyPath, dotted, split_remedy
from corral.experiments.inputs.dataset_file import DatasetReader
from corral.experiments.inputs.model_directory import context_length, inspect_model, model_sizes
from corral.experiments.inputs.parameters import check_lora
from corral.experiments.prompts.length_limits import LengthLimits
from corral.scheduling.mesh import Mesh

MODEL_CONTEXT = "the model's max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDataset:
    """What was found in a dataset."""

    num_rows: int | None
    """Rows that can be used; None if it is broken."""
    problems: list[ConfigProblem]
    too_long: tuple[int, ...] = ()
    """Lines, from 1, of rows that are longer than they may be."""
    excess: str = ""
    """Where the first of them is, and by what it is too long."""


def check_dataset(
    config: DatasetConfig, path: KeyPath, *, kind: RowKind, limits: LengthLimits, content: bytes | None = None
) -> CheckedDataset:
    """Rows of a dataset, and what is wrong with it, which single rows that are too long are not.

    Args:
        content: the rows, where no file has them yet.
    """
    if config.path is None and content is None:
        message, hint = f"{dotted(path)}.path is missing", "name the file; only rollout.environment brings its own rows"
        return CheckedDataset(num_rows=None, problems=[ConfigProblem(message, hint, path=path)])
    reader = DatasetReader(config=config, kind=kind, content=content)
    problems: list[ConfigProblem] = []
    too_long: list[int] = []
    first, where_read = "", ""
    try:
        for row in reader:
            where_read = "" if isinstance(row.prompt, str) else f"{reader.name}:{row.line}: "
            if excess := limits.find_excess(row.prompt, row.answers, tools=row.tools):
                first = first or f"{reader.name}:{row.line}: {excess}"
                too_long.append(row.line)
    except ValueError as error:
        message, hint = split_remedy(str(error))
        problems.append(ConfigProblem(where_read + message, hint))
    num_rows = reader.num_rows - len(too_long)
    if too_long and not num_rows:
        hint = f"raise {dotted(path)}.max_prompt_tokens and what has to hold it, or shorten the rows"
        problems.append(ConfigProblem(f"every row is too long; the first: {first}", hint))
    where = (*path, "path")
    problems = [replace(one, path=where) for one in (*reader.problems, *problems)]
    return CheckedDataset(
        num_rows=None if problems else num_rows, problems=problems, too_long=tuple(too_long), excess=first
    )


def check_batch(
    *, num_rows: int, epochs: int, train_batch_size: int, meshes: Mapping[str, Mesh]
) -> Iterator[ConfigProblem]:
    """A batch that the data never fills, or that leaves ranks without work.

    Args:
        meshes: the ranks of each role; none if the allocation is broken.
    """
    path = ("train_batch_size",)
    if train_batch_size > num_rows * epochs:
        yield ConfigProblem(
            f"train_batch_size {train_batch_size} is more than the dataset's {num_rows} rows x {epochs} epochs",
            f"at most {num_rows * epochs} fits; or raise control.total_train_epochs",
            path=path,
        )
    too_wide = {role: mesh.dims.dp for role, mesh in meshes.items() if mesh.dims.dp > train_batch_size}
    if too_wide:
        ranks = ", ".join(f"{dp} of {role}" for role, dp in too_wide.items())
        yield ConfigProblem(
            f"train_batch_size {train_batch_size} leaves data-parallel ranks without work: there are {ranks}",
            f"at least {max(too_wide.values())}, or at most d{train_batch_size} in the allocation",
            path=path,
        )


def check_model(config: ModelConfig, path: KeyPath) -> Iterator[ConfigProblem]:
    """What is wrong with a model on disk, and with its adapters."""
    yield from (replace(problem, path=(*path, "path")) for problem in inspect_model(config.path))
    yield from (replace(problem, path=(*path, *problem.path)) for problem in check_lora(config))


def check_vocabulary(model: ModelConfig, first: ModelConfig, *, key: str) -> Iterator[ConfigProblem]:
    """A model beside the actor, the first one, whose tokens are not the actor's."""
    own, actors = (model_sizes(one.path).get("vocab_size") for one in (model, first))
    if own is not None and actors is not None and own != actors:
        yield ConfigProblem(
            f"{key} has a vocabulary of {own}, the actor one of {actors}",
            "use the model that the actor starts from, or one with the same tokenizer",
            path=(key, "path"),
        )


def check_length(
    *, max_prompt_tokens: int, max_new_tokens: int, limit: int | None, limit_name: str, path: KeyPath
) -> Iterator[ConfigProblem]:
    """Prompts and answers that together exceed a limit; `path` is the key of max_new_tokens."""
    needed = max_prompt_tokens + max_new_tokens
    remedy = "use a model with a longer context" if limit_name == MODEL_CONTEXT else f"raise {limit_name}"
    if limit is not None and needed > limit:
        yield ConfigProblem(
            f"{max_prompt_tokens} prompt tokens + {max_new_tokens} new tokens = {needed} do not fit "
            f"{limit_name} = {limit}",
            f"lower max_new_tokens or the dataset's max_prompt_tokens, or {remedy}",
            path=path,
        )


def check_evaluation(
    evaluation: EvaluationConfig,
    model: Path,
    *,
    kind: RowKind,
    limits: LengthLimits,
    on_servers: bool,
    content: bytes | None = None,
) -> Iterator[ConfigProblem]:
    """Held-out rows that are broken or too long for the model, and answers that nobody can give.

    Args:
        model: directory of the one that answers.
        limits: of the rows; those of the training data, but for the prompts.
        on_servers: whether generation servers answer, which can sample.
        content: the held-out rows, where no file has them yet.
    """
    limits = replace(limits, max_prompt_tokens=evaluation.dataset.max_prompt_tokens)
    for name, config in evaluation.datasets.items():
        path: KeyPath = ("evaluation", "more", name) if name else ("evaluation", "dataset", "path")
        rows = None if name else content
        found = check_dataset(config, ("evaluation", "dataset"), kind=kind, limits=limits, content=rows)
        yield from (replace(problem, path=path) for problem in found.problems)
        if found.too_long and not found.problems:
            # An accuracy is one of all problems, or cannot be compared with that of somebody else.
            yield ConfigProblem(
                f"{len(found.too_long)} held-out rows are too long; the first: {found.excess}",
                "shorten or remove them, or raise evaluation.dataset.max_prompt_tokens and what has to hold it",
                path=path,
            )
    if not on_servers and (evaluation.sampling.temperature > 0.0 or evaluation.answers_per_problem > 1):
        yield ConfigProblem(
            "without generation servers held-out problems are answered once, by the most likely tokens",
            "leave out evaluation.sampling.temperature and evaluation.answers_per_problem",
            path=("evaluation",),
        )
    if kind != "preferences":
        yield from check_length(
            max_prompt_tokens=evaluation.dataset.max_prompt_tokens,
            max_new_tokens=evaluation.sampling.max_new_tokens,
            limit=context_length(model),
            limit_name=MODEL_CONTEXT,
            path=("evaluation", "sampling", "max_new_tokens"),
        )


def dataset_warnings(
    dataset: DatasetConfig, evaluation: EvaluationConfig | None, checked: CheckedDataset, *, kind: RowKind
) -> Iterator[str]:
    """Settings of datasets that have no effect as they stand, and an evaluation that shows nothing."""
    datasets = {"dataset": dataset}
    if evaluation is not None:
        datasets["evaluation.dataset"] = evaluation.dataset
        if evaluation.dataset.path == dataset.path and dataset.path is not None:
            yield "evaluation.dataset is the training data: the accuracy says nothing about new problems"
    unread = {"answer_key"} if kind == "preferences" else {"chosen_key", "rejected_key"}
    for name, one in datasets.items():
        for key in sorted(unread & one.model_fields_set):
            yield f"{name}.{key} has no effect: rows of this experiment are {kind}"
    if evaluation is not None and kind == "preferences" and evaluation.model_fields_set & {"sampling", "more"}:
        yield "evaluation.sampling and evaluation.more have no effect: nothing is answered where rows are preferences"
    if count := len(checked.too_long):
        in_all, first = count + (checked.num_rows or 0), checked.excess
        yield f"{count} of {in_all} rows of the dataset are left out, since they are too long; the first: {first}"
