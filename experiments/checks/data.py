"""Checks of rows, batches and models: what the files hold, and whether lengths and vocabularies go together."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from corral.experiments.config.data import DatasetConfig, EvaluationConfig, RowKind
from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.datasets.dataset import Dataset, Look
from corral.experiments.errors import ConfigError, ConfigProblem, KeyPath, did_you_mean, dotted
from corral.experiments.prompts.length_limits import LengthLimits
from corral.scheduling.errors import message_and_hint

MODEL_CONTEXT = "the model's max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDataset:
    """The result of the checks of a dataset."""

    num_rows: int | None
    """Rows that can be used; None if it is broken."""
    problems: list[ConfigProblem]
    too_long: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Numbers of rows that are longer than they may be, by source; empty where not every row was looked at."""
    fields: frozenset[str] = frozenset()
    """The fields of the rows that were looked at."""
    warnings: tuple[str, ...] = ()
    """What has to be known of rows that are too long, and of those that were not looked at."""


def check_dataset(
    config: DatasetConfig, path: KeyPath, *, kind: RowKind, limits: LengthLimits, content: bytes | None = None
) -> CheckedDataset:
    """Rows of a dataset, and what is wrong with it, which single rows that are too long are not.

    Args:
        config: with the files that its rows are in.
        content: the rows, where no file has them yet.
    """
    if not config.is_named and content is None:
        message, hint = f"{dotted(path)}.path is missing", "name the file; only rollout.environment brings its own rows"
        return CheckedDataset(num_rows=None, problems=[ConfigProblem(message, hint, path=path)])
    where = (*path, "sources" if config.sources else "hub" if config.hub else "path")
    try:
        look = Look(Dataset.open(config, kind=kind, content=content))
    except ConfigError as error:
        return CheckedDataset(num_rows=None, problems=[replace(one, path=where) for one in error.problems])
    problems: list[ConfigProblem] = []
    too_long, firsts, looked_at, fields = _too_long(look, limits, problems)
    for name, numbers in too_long.items():
        if len(numbers) == looked_at[name]:
            hint = f"raise {dotted(path)}.max_prompt_tokens and what has to hold it, or shorten the rows"
            which, hint = (f" of sources.{name}", f"{hint}, or remove it") if name else ("", hint)
            problems.append(ConfigProblem(f"every row{which} is too long; the first: {firsts[name]}", hint))
    problems = [replace(one, path=(*path, *one.path) if one.path else where) for one in (*look.problems, *problems)]
    if problems:
        return CheckedDataset(num_rows=None, problems=problems)
    num_too_long, first = sum(map(len, too_long.values())), next(iter(firsts.values()), "")
    if not look.is_whole:
        which = f"{num_too_long} of them are too long; the first: {first}" if first else "none of them is too long"
        text = f"{looked_at.total()} of {look.num_rows} rows were looked at, evenly from everywhere; {which}"
        later = "rows that are broken or too long are dropped and counted when it is their turn"
        return CheckedDataset(num_rows=look.num_rows, problems=[], fields=fields, warnings=(f"{text}; {later}",))
    text = f"{num_too_long} of {look.num_rows} rows of the dataset are left out, since they are too long; the first: "
    warnings = (text + first,) if num_too_long else ()
    num_rows = look.num_rows - num_too_long
    return CheckedDataset(num_rows=num_rows, problems=[], too_long=too_long, fields=fields, warnings=warnings)


def _too_long(
    look: Look, limits: LengthLimits, problems: list[ConfigProblem]
) -> tuple[dict[str, list[int]], dict[str, str], Counter[str], frozenset[str]]:
    """By source: numbers of rows that are, what the first of them is, how many were looked at; and what fields they
    have."""
    too_long: dict[str, list[int]] = {}
    firsts, looked_at, fields, place = dict[str, str](), Counter[str](), set[str](), ""
    try:
        for source, number, row in look:
            looked_at[source.name] += 1
            fields |= {name for name, value in row.fields.items() if value is not None}
            place = "" if isinstance(row.prompt, str) else f"{row.place}: "
            excess = limits.find_excess(row.prompt, row.answers, tools=row.tools)
            if not excess and row.teacher_prompt is not row.prompt:
                excess = limits.find_excess(row.teacher_prompt, tools=row.tools)
            if excess:
                firsts.setdefault(source.name, f"{row.place}: {excess}")
                too_long.setdefault(source.name, []).append(number)
    except ValueError as error:
        message, hint = message_and_hint(error)
        problems.append(ConfigProblem(place + message, hint))
    return too_long, firsts, looked_at, frozenset(fields)


def check_field(field: str | None, what: str, checked: CheckedDataset, path: KeyPath) -> Iterator[ConfigProblem]:
    """A problem if a key names a field that no row has."""
    if field is not None and checked.num_rows is not None and field not in checked.fields:
        yield ConfigProblem(
            f"no row that was looked at has {what} in a field {field!r}",
            did_you_mean(field, sorted(checked.fields), "name the field of the rows that has one, or remove it"),
            path=path,
        )


def check_columns(dataset: DatasetConfig, checked: CheckedDataset) -> Iterator[ConfigProblem]:
    """Columns that are read where rows have them, and that none has."""
    for name, source in dataset.all_sources.items():
        place = ("dataset", "sources", name) if name else ("dataset",)
        named = source.columns
        yield from check_field(named.get("temperature"), "a temperature", checked, (*place, "columns", "temperature"))
        path = (*place, "columns", "teacher_prompt")
        yield from check_field(named.get("teacher_prompt"), "a prompt for teachers", checked, path)


def check_length(
    dataset: DatasetConfig, sampling: SamplingConfig, bounds: Mapping[str, int | None], path: KeyPath
) -> Iterator[ConfigProblem]:
    """Prompts and answers that together exceed one of the bounds, by name; `path` is the key of max_new_tokens."""
    needed = dataset.max_prompt_tokens + sampling.max_new_tokens
    for name, bound in bounds.items():
        remedy = "use a model with a longer context" if name == MODEL_CONTEXT else f"raise {name}"
        if bound is not None and needed > bound:
            yield ConfigProblem(
                f"{dataset.max_prompt_tokens} prompt tokens + {sampling.max_new_tokens} new tokens = {needed} do not "
                f"fit {name} = {bound}",
                f"lower max_new_tokens or the dataset's max_prompt_tokens, or {remedy}",
                path=path,
            )


def dataset_warnings(
    dataset: DatasetConfig, evaluation: EvaluationConfig | None, checked: CheckedDataset, *, kind: RowKind
) -> Iterator[str]:
    """Settings of datasets that have no effect as they stand, and an evaluation that shows nothing."""
    datasets = {"dataset": dataset}
    if evaluation is not None:
        datasets["evaluation.dataset"] = evaluation.dataset
        held_out = evaluation.dataset
        is_same = (held_out.files, held_out.rows, held_out.where) == (dataset.files, dataset.rows, dataset.where)
        if dataset.files and is_same:
            yield "evaluation.dataset is the training data: the accuracy says nothing about new problems"
        if any(source.order is not None for source in held_out.all_sources.values()):
            yield "order has no effect in evaluation.dataset: held-out rows are all looked at each time"
        if evaluation.dataset.names_temperatures:
            yield "columns.temperature has no effect in evaluation.dataset: evaluation.sampling says how is sampled"
    unread = {"answer"} if kind == "preferences" else {"chosen", "rejected"}
    unread |= {"teacher_prompt", "temperature"} if kind in ("conversations", "preferences") else set()
    for name, one in datasets.items():
        given = {column for source in one.all_sources.values() for column in source.columns}
        for key in sorted(unread & given):
            yield f"{name}.columns.{key} has no effect: rows of this experiment are {kind}"
    if evaluation is not None and kind == "preferences" and evaluation.model_fields_set & {"sampling", "more"}:
        yield "evaluation.sampling and evaluation.more have no effect: nothing is answered where rows are preferences"
    yield from checked.warnings


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
