"""`rl-submit --dry-run=prompts`: the first rows as the model will see them, and how long rows are.

    RunPlan ──► tokenizer, template, rows ──► a panel a row: special tokens, what is given, what is learned
                                          └─► a histogram of lengths in tokens
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from corral.experiments.datasets.dataset import Dataset, Look
from corral.experiments.datasets.formats import name_of
from corral.experiments.datasets.row_parser import DatasetRow
from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.experiments.prompts.row_prompts import LearnedSequence, PromptEncoder
from corral.experiments.worker_specs import DatasetSpec, ModelWorkerSpec, RolloutWorkerSpec

_SHOWN_PER_SOURCE = 3
_MEASURED = 1000
_BARS, _BAR_WIDTH = 12, 40
_GIVEN, _SPECIAL, _LEARNED, _LEARNED_SPECIAL = "", "cyan", "green", "bold green"
_SHOWN_CHARACTERS = 4000  # of a row; one of a hundred thousand would hide all others


def print_prompts(plan: RunPlan, console: Console) -> None:
    """What is learned from, for people.

    Raises:
        ConfigError: if there is no file of rows yet, or a row cannot be shown.
    """
    spec, encoder = _data_of(plan)
    try:
        dataset = Dataset.planned(spec)
    except OSError as error:
        hint = "look at the tasks.jsonl of a trial that has been submitted"
        raise ConfigError.of(f"the tasks of the environment are in no file yet: {error}", hint=hint) from error
    try:
        console.print(_legend(spec))
        for source in dataset.sources:
            rows = (source.read(number, row_id) for row_id, number in source.names.items())
            for row in islice((row for row in rows if row is not None), _SHOWN_PER_SOURCE):
                console.print(_panel(row, encoder))
        console.print(_histogram(dataset, encoder))
    except ValueError as error:
        raise ConfigError.of(str(error)) from error


def sequences_of(row: DatasetRow, encoder: PromptEncoder) -> Iterator[tuple[str, LearnedSequence]]:
    """What the model is shown of a row: a prompt, or each answer with what is before it."""
    learned = len(row.answers) == 2 or not row.prompt or not isinstance(row.answers[0] if row.answers else "", str)
    for name, answer in zip(("chosen", "rejected") if len(row.answers) == 2 else ("row",), row.answers, strict=False):
        if learned:
            yield name, encoder.encode_learned(row.prompt, answer, tools=row.tools)
    if not learned:
        ids = encoder.encode(row.prompt, tools=row.tools)
        yield "prompt", LearnedSequence(ids, [True] * len(ids))


def _data_of(plan: RunPlan) -> tuple[DatasetSpec, PromptEncoder]:
    for worker in plan.all_of(RolloutWorkerSpec):
        return worker.dataset, PromptEncoder(worker.tokenizer)
    rank = next(one for one in plan.all_of(ModelWorkerSpec) if one.dataset is not None)
    assert rank.dataset is not None
    return rank.dataset, PromptEncoder(rank.tokenizer)
