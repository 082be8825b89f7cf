"""`rl-submit --dry-run=prompts`: the first rows as the model will see them, and how long rows are.

RunPlan ──► tokenizer, template, rows ──► a panel a row: special tokens, what is given, what is learned
                                      └─► a histogram of lengths in tokens
"""

from collections import Counter
from itertools import groupby, islice
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from corral.experiments.config.data import RowKind
from corral.experiments.config.rollout import RolloutConfig
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
_STYLES = {(False, True): "", (True, True): "cyan", (False, False): "green", (True, False): "bold green"}
"""By whether a token is special, and given."""
_SHOWN_CHARACTERS = 4000  # of a row; one of a hundred thousand would hide all others


def print_prompts(plan: RunPlan, console: Console) -> None:
    """What is learned from, for people.

    Raises:
        ConfigError: if there is no file of rows yet, or a row cannot be shown.
    """
    spec, encoder = _data_of(plan)
    try:
        dataset = Dataset.planned(spec)
        console.print(_legend(spec))
        if (workers := plan.all_of(RolloutWorkerSpec)) and workers[0].rollout.makes_episodes:
            console.print(_of_agents(workers[0].rollout))
        for source in dataset.sources:
            for row_id, number in islice(source.index.numbers.items(), _SHOWN_PER_SOURCE):
                if (row := source.read(number, row_id)) is not None:
                    known_as = "" if row_id == str(number) else f": {row_id}"
                    title = Text(f"{name_of(source.config)}, row {number}{known_as}")
                    console.print(_panel(row, title, spec, encoder))
        console.print(_histogram(dataset, spec, encoder))
    except OSError as error:
        hint = "look at the tasks.jsonl of a trial that has been submitted"
        raise ConfigError.of(f"the tasks of the environment are in no file yet: {error}", hint=hint) from error
    except ValueError as error:
        raise ConfigError.of(str(error)) from error


def sequences_of(row: DatasetRow, kind: RowKind, encoder: PromptEncoder) -> dict[str, LearnedSequence]:
    """What the model is shown of a row, by what it is: the prompt; or each answer with all that is before it."""
    if kind in ("conversations", "preferences"):
        names = ("chosen", "rejected") if kind == "preferences" else ("row",)
        learned = (encoder.encode_learned(row.prompt, answer, tools=row.tools) for answer in row.answers)
        return dict(zip(names, learned, strict=True))
    prompts = {"prompt": row.prompt}
    if row.teacher_prompt is not row.prompt:
        prompts["what teachers read"] = row.teacher_prompt
    encoded = {name: encoder.encode(prompt, tools=row.tools) for name, prompt in prompts.items()}
    return {name: LearnedSequence(ids, [True] * len(ids)) for name, ids in encoded.items()}


def as_seen(sequence: LearnedSequence, tokenizer: Any) -> Text:
    """The tokens as text: special ones are written out, and marked; so is what is learned."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    text = Text()
    kinds = [(token in special, is_given) for token, is_given in zip(sequence.ids, sequence.is_given, strict=True)]
    for (is_special, is_given), run in groupby(range(len(kinds)), key=kinds.__getitem__):
        said = tokenizer.decode([sequence.ids[at] for at in run], skip_special_tokens=False)
        if len(text) + len(said) > _SHOWN_CHARACTERS:
            text.append(" ... (cut here; the model sees all of it)", "dim")
            break
        text.append(said, _STYLES[is_special, is_given])
    return text


def _data_of(plan: RunPlan) -> tuple[DatasetSpec, PromptEncoder]:
    for worker in plan.all_of(RolloutWorkerSpec):
        return worker.dataset, PromptEncoder(worker.tokenizer, worker.dataset.config.chat_template_kwargs)
    ranks = ((rank.dataset, rank.tokenizer) for rank in plan.all_of(ModelWorkerSpec))
    dataset, tokenizer = next((dataset, tokenizer) for dataset, tokenizer in ranks if dataset is not None)
    return dataset, PromptEncoder(tokenizer, dataset.config.chat_template_kwargs)


def _legend(spec: DatasetSpec) -> Text:
    text = Text(f"{name_of(spec.config)}: {spec.num_rows} rows   ")
    text.append("<special token>", _STYLES[True, True])
    if spec.row_kind in ("conversations", "preferences"):
        text.append("   given   ").append("learned", _STYLES[False, False])
    return text


def _of_agents(rollout: RolloutConfig) -> Text:
    who = f"agent {rollout.agent}" if rollout.environment is None else "the environment"
    tools = ", ".join(map(str, rollout.agent_settings.get("tools") or ()))
    added = f"its tools ({tools})" if tools else "tools or a system message"
    shown = "rl-samples TRIAL --show ANSWER shows them in whole episodes"
    return Text(f"{who} may add {added} to these prompts, and they are not shown here; {shown}", "yellow")


def _panel(row: DatasetRow, title: Text, spec: DatasetSpec, encoder: PromptEncoder) -> Panel:
    parts: list[Text] = []
    for name, sequence in sequences_of(row, spec.row_kind, encoder).items():
        num_given = sum(sequence.is_given)
        counted = f"{name}: {len(sequence.ids)} tokens"
        if num_given < len(sequence.ids):
            counted += f", {num_given} given, {len(sequence.ids) - num_given} learned"
        parts += [Text(counted, "bold"), as_seen(sequence, encoder.tokenizer)]
    if spec.row_kind in ("prompts", "answers") and row.answers:
        parts.append(Text(f"answer that rewards see: {row.answers[0]}", "dim"))
    if row.temperature is not None:
        parts.append(Text(f"answers are sampled at temperature {row.temperature:g}", "dim"))
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def _histogram(dataset: Dataset, spec: DatasetSpec, encoder: PromptEncoder) -> RenderableType:
    lengths: list[int] = []
    broken = 0
    look = Look(dataset, most=_MEASURED)
    for _, _, row in look:
        try:
            lengths += [len(one.ids) for one in sequences_of(row, spec.row_kind, encoder).values()]
        except ValueError:
            broken += 1
    width = max(1, -(-(max(lengths) - min(lengths) + 1) // _BARS))
    counts = Counter((length - min(lengths)) // width for length in lengths)
    table = Table.grid(padding=(0, 1))
    for bar in range(max(counts) + 1):
        first = min(lengths) + bar * width
        span = str(first) if width == 1 else f"{first}-{first + width - 1}"
        table.add_row(
            Text(span, justify="right"),
            "\u2588" * -(-counts[bar] * _BAR_WIDTH // max(counts.values())),
            str(counts[bar]),
        )
    ordered = sorted(lengths)
    of = "all rows" if look.is_whole else f"{len(lengths)} sequences of rows from everywhere"
    facts = f"tokens, {of}: least {ordered[0]}, median {ordered[len(ordered) // 2]}, most {ordered[-1]}"
    return Group(Text(facts + (f"; {broken} rows cannot be shown" if broken else ""), "bold"), table)
