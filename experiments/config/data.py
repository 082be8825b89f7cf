"""Training data: rows with a prompt, and the fields that a reward or a loss reads beside it.

path, hub ──rows──► slice ──transform──► columns ──► prompts, answers, conversations, pairs
sources: {name: the same, weight} ──► one order of all of them
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from corral.experiments.config.base import FrozenConfig, changed
from corral.experiments.config.condition import Condition, FindingPattern
from corral.experiments.config.control import Every
from corral.experiments.config.rollout import ImportPath, SamplingConfig
from corral.scheduling.cadence import Frequency, parse_frequency
from corral.scheduling.errors import RuleError

RowKind = Literal["prompts", "answers", "conversations", "preferences"]
"""What a row must have: a prompt; an answer besides, which prompts may have, too; one that is learned, of several turns
perhaps; or a chosen and a rejected answer."""

HELD_OUT_ANSWERS = "held_out_answers"
"""What a call that evaluates by answering problems is implemented by."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ORIGIN = {"path", "hub", "subset", "split", "rows", "transform", "where", "order", "columns"}
Named = TypeVar("Named")


def _checked_names(value: dict[str, Named]) -> dict[str, Named]:
    for name in value:
        if not _NAME.fullmatch(name):
            raise RuleError(f"{name!r} is no name of a metric", "use letters, digits, . _ and -")
    return value


def _whole_split(split: str) -> str:
    if "[" in split:
        raise RuleError(f"split {split!r} is a part of one", "name the split, and say in rows which of them")
    return split


def _condition(text: str) -> str:
    Condition.parse(text)
    return text


Column = Literal[
    "prompt", "messages", "tools", "teacher_prompt", "answer", "chosen", "rejected", "id", "temperature"
]  # fmt: skip
Columns = dict[Column, Annotated[str, Field(min_length=1)]]


def column(columns: Columns, use: Column) -> str:
    """The field of rows for a use that has a field by default: the field of the same name."""
    return columns.get(use, use)


class SourceConfig(FrozenConfig):
    """Where rows come from, which of them are taken, and how their fields are called."""

    path: Path | None = None
    """File of JSON lines, Parquet, Arrow or CSV; a folder that `datasets` has saved; a folder of such files, or a
    pattern such as data/*.parquet, which are read one after the other by their names. None with `hub`, with `sources`,
    or with `rollout.environment`, whose tasks are the rows then."""
    hub: str | None = Field(default=None, min_length=1)
    """A data set of the Hugging Face hub, such as openai/gsm8k, that is in this user's cache. Nothing is downloaded."""
    subset: str | None = Field(default=None, min_length=1)
    """Which of the configurations of `hub`, such as main."""
    split: Annotated[str, Field(min_length=1), AfterValidator(_whole_split)] | None = None
    """Which split, such as train, where `hub` or a saved folder has several."""
    rows: str = Field(default=":", pattern=r"^\d*:\d*$")
    """Which rows, by their numbers from 0, as Python slices lists: 1000:2000, or :500 for the first 500."""
    transform: ImportPath | None = None
    """A function of yours: row -> row, or None to leave it out. It is called once for each row, when the experiment is
    submitted; what it returns is kept in the cache."""
    where: Annotated[str, AfterValidator(_condition)] | None = None
    """Which rows are taken, by their fields: `difficulty <= 3 and len(prompt) < 500`. It may have comparisons, in, and,
    or, not, len() and constants; a field that a row does not have is None."""
    order: str | None = Field(default=None, min_length=1)
    """The field whose numbers a pass goes through from the lowest to the highest; rows that are equal in it come in an
    order of the seed's."""
    columns: Columns = {}
    """Names of fields, where rows have others than these: `prompt` (text, or, where answers are rewarded, messages or token ids), `answer` (the reference: text, a number, messages; where only rewards read it, any JSON), `messages` (a whole conversation in place of both, where answers of rows are learned), `tools` (OpenAI's list of functions, beside messages), `chosen` and `rejected` (a pair), `id` (else a row has its number, from 0). Two fields are read only if they are named: `teacher_prompt` (what teachers read in the prompt's place) and `temperature` (0.01 to 10, in place of `rollout.sampling.temperature`)."""  # noqa: E501
    files: tuple[Path, ...] = ()
    """The files of `path` or `hub`, as found at submission; not to be written by hand."""

    @property
    def first_and_last(self) -> slice:
        """`rows`, as a slice."""
        first, _, last = self.rows.partition(":")
        return slice(int(first or 0), int(last) if last else None)


class MixedSourceConfig(SourceConfig):
    """One of several sources."""

    weight: float | None = Field(default=None, gt=0.0)
    """Weight of this source among the prompts, relative to those of the other sources. None: the number of its rows."""


class DatasetConfig(SourceConfig):
    """Rows that are learned from, or held out; those that are too long are left out."""

    sources: Annotated[dict[str, MixedSourceConfig], AfterValidator(_checked_names)] = {}
    """Several sources by name, in place of `path` and `hub`: prompts are taken from all of them in proportion to their
    weights, and rewards are reported source by source."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens, `columns.teacher_prompt` included. Rows that are longer are left out, and counted; a
    held-out row that is longer is refused, and a prompt that an agent makes is dropped."""
    shuffle: bool = True
    """Whether each pass over the data has an order of its own, drawn from the trial's seed."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Arguments for the model's chat template, such as {enable_thinking: false}, wherever it writes messages of the
    trial: rows, held-out rows, sessions of agents, requests to the endpoint. Held-out rows have those of `dataset`."""

    sampler: ImportPath | None = None
    """A function that says how often a row is drawn, by the mean rewards of its last groups: list of numbers -> weight,
    compared with 1.0 of a row that was never drawn. corral.workers.data.prompt_weights:middling draws most often what
    succeeds every second time, and corral.workers.data.prompt_weights:unsolved retires what is solved. None takes all
    rows pass by pass."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        for name, one in self.all_sources.items():
            where = f"sources.{name} has" if name else "there are"
            if one.path is not None and one.hub is not None:
                raise RuleError(f"{where} both path and hub", "keep the one that the rows come from")
            if name and one.path is None and one.hub is None:
                raise RuleError(f"{where} neither path nor hub", "say where its rows come from")
            if one.subset is not None and one.hub is None:
                raise RuleError(f"{where} a subset, and only data sets of `hub` have some", "remove it")
        if self.sources and (own := changed(self, _ORIGIN)):
            raise RuleError(f"{', '.join(sorted(own))} and sources both say what the rows are", "keep one of them")
        if self.sampler is not None and any(one.order is not None for one in self.all_sources.values()):
            raise RuleError("order and sampler both say which row comes next", "keep one of them")
        return self

    @property
    def all_sources(self) -> Mapping[str, SourceConfig]:
        """By name; where there is one, it has none."""
        return self.sources or {"": self}

    @property
    def has_teacher_prompts(self) -> bool:
        """Whether teachers read what the policy does not."""
        return any("teacher_prompt" in one.columns for one in self.all_sources.values())

    def of_file(self, path: Path) -> Self:
        """Another file, whose rows are read as those here."""
        return self.model_copy(
            update={"path": path, "hub": None, "split": None, "files": (), "rows": ":", "sources": {}}
        )

    @property
    def names_temperatures(self) -> bool:
        """Whether its rows may say how their answers are sampled."""
        return any("temperature" in one.columns for one in self.all_sources.values())

    @property
    def is_named(self) -> bool:
        """Whether it says where the rows come from."""
        return bool(self.sources) or self.path is not None or self.hub is not None


class EvaluationSampling(SamplingConfig):
    """How answers to held-out problems are sampled; nothing is learned from them."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Longest answer in tokens; where rows are preferences, nothing is answered."""
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """Divides the logits; 0.0 takes the most likely token each time."""


def _number_or_name(value: Any) -> Any:
    """A number that was written as text, as on a command line, as the number."""
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return value


class EvaluationConfig(FrozenConfig):
    """Held-out rows, of the same kind as those that are learned from. Problems are answered by generation servers
    beside training, or, where there are none, by the ranks that train; a loss on rows judges these, too."""

    dataset: DatasetConfig
    """The held-out rows."""
    more: Annotated[dict[str, Path], AfterValidator(_checked_names)] = {}
    """Further files of held-out problems by name, read as `dataset` is: {aime: aime.jsonl} gives eval/aime/accuracy."""
    every: Every = "20 steps"
    """From one evaluation to the next, as in `control.commit_every`. The first is before the first step, the last after
    the last step."""
    batch_size: int = Field(default=64, ge=1)
    """Rows that all ranks, or all generation servers, together look at at a time."""
    sampling: EvaluationSampling = EvaluationSampling()
    """How answers are sampled."""
    answers_per_problem: int = Field(default=1, ge=1, le=65536)
    """With more than one, accuracy is that of all answers, and eval/pass@k says how often one of k answers is right."""
    correct: Annotated[float | str, BeforeValidator(_number_or_name)] = 1.0
    """Which answers accuracy, pass@k and majority count as right: those with at least this reward; or the name of a part of `rollout.reward`, whose own number, before its weight, has to be at least 1."""  # noqa: E501
    vote: FindingPattern | None = None
    r"""A regular expression whose first group is what an answer says, where it matches last, such as \\boxed\{(.*?)\}: eval/majority then is how often what most of a problem's answers say is right."""  # noqa: E501
    best: str | None = Field(default=None, min_length=1)
    """Keep as exports/best the weights whose evaluation has the best value of this number, by its name in metrics.jsonl
    without eval/: accuracy, reward/mean, pass@8, loss, or aime/accuracy of one of `more`. Of a name that ends in loss
    the lowest is the best, of all others the highest. None keeps the last weights, and those that `control` says."""

    @model_validator(mode="after")
    def _looks_at_all_rows(self) -> Self:
        if self.dataset.sampler is not None:
            raise RuleError(
                "held-out rows are all looked at each time, and none is drawn", "remove evaluation.dataset.sampler"
            )
        return self

    @property
    def datasets(self) -> dict[str, DatasetConfig]:
        """All held-out rows by name, which for those of `dataset` is empty."""
        others = {name: self.dataset.of_file(path) for name, path in self.more.items()}
        return {"": self.dataset, **others}

    def is_correct(self, reward: float, parts: Mapping[str, float]) -> bool | None:
        """Whether an answer is right; None if the part that says so has not judged it.

        Args:
            parts: of the reward, by name.
        """
        if isinstance(self.correct, str):
            return parts[self.correct] >= 1.0 if self.correct in parts else None
        return reward >= self.correct

    @property
    def metrics(self) -> list[str]:
        """Numbers of an evaluation by generation servers, by their names in metrics.jsonl without eval/."""
        names = ["accuracy", "reward/mean", "response_length/mean", "problems", "unjudged"]
        names += [f"pass@{2**k}" for k in range(1, self.answers_per_problem.bit_length())]
        names += ["majority"] if self.vote else []
        return [f"{dataset}/{name}" if dataset else name for dataset in self.datasets for name in names]

    @property
    def frequency(self) -> Frequency:
        """When an evaluation is due."""
        return parse_frequency(self.every)
