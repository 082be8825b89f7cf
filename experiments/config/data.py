"""What is learned from: one JSON object a line, with a prompt and what reward or loss want beside it."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from corral.experiments.config.base import FrozenConfig
from corral.experiments.config.rollout import SamplingConfig
from corral.scheduling.cadence import Frequency

RowKind = Literal["prompts", "answers", "preferences"]
"""What a row must have: a prompt; an answer besides, which prompts may have, too; or a chosen and a rejected answer."""

HELD_OUT_ANSWERS = "held_out_answers"
"""What a call that evaluates by answering problems is implemented by."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")


class DatasetConfig(FrozenConfig):
    """A jsonl file; every row is checked before anything is submitted, and those that are too long are left out."""

    path: Path | None = None
    """File with one JSON object a line; None only with `rollout.environment`, whose tasks are the rows then."""
    prompt_key: str = Field(default="prompt", min_length=1)
    """Field that holds the prompt: a non-empty string; or, where answers are rewarded, a list of messages, which the
    model's own chat template writes down, or a list of token ids."""
    tools_key: str = Field(default="tools", min_length=1)
    """Field that holds what the model is told that it may call, beside a prompt of messages: a list of OpenAI's
    {"type": "function", "function": {...}}. A row need not have it."""
    answer_key: str = Field(default="answer", min_length=1)
    """Field that holds the reference answer, a string or a number, which is taken as its text."""
    chosen_key: str = Field(default="chosen", min_length=1)
    """Field that holds the preferred answer of a pair, a string."""
    rejected_key: str = Field(default="rejected", min_length=1)
    """Field that holds the other answer of a pair, a string."""
    id_key: str = Field(default="id", min_length=1)
    """Field that identifies the row; a row without it is known by its line number, counted from 0."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens. Rows that are longer are left out, and counted at submission; a held-out row that is
    longer is refused, and a prompt that an agent makes is dropped."""
    shuffle: bool = True
    """Whether each pass over the data has an order of its own, drawn from the trial's seed."""

    @property
    def file(self) -> Path:
        """`path`, where it has to be known; a plan's always is."""
        if self.path is None:
            raise ValueError("dataset.path is missing; name the file, or set rollout.environment")
        return self.path


class EvaluationSampling(SamplingConfig):
    """How answers to held-out problems are sampled; nothing is learned from them."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Longest answer in tokens; where rows are preferences, nothing is answered."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Divides the logits; 0.0 takes the most likely token each time."""


class EvaluationConfig(FrozenConfig):
    """Held-out rows, of the same kind as those that are learned from. Problems are answered by generation servers
    beside training, or, where there are none, by the ranks that train; a loss on rows judges these, too."""

    dataset: DatasetConfig
    """The held-out rows."""
    more: dict[str, Path] = {}
    """Further files of held-out problems by name, read as `dataset` is: {aime: aime.jsonl} gives eval/aime/accuracy."""
    every_steps: int | None = Field(default=20, ge=1)
    """Train steps from one evaluation to the next; the first is before the first step, the last after the last one.
    None leaves it to `every_epochs` and `every_seconds`; of several, whichever is due first counts."""
    every_epochs: int | None = Field(default=None, ge=1)
    """Passes over the training data from one evaluation to the next."""
    every_seconds: float | None = Field(default=None, gt=0.0)
    """Seconds from one evaluation to the next, counted anew after a restart."""
    batch_size: int = Field(default=64, ge=1)
    """Rows that all ranks, or all generation servers, together look at at a time."""
    sampling: EvaluationSampling = EvaluationSampling()
    """How answers are sampled."""
    answers_per_problem: int = Field(default=1, ge=1)
    """With more than one, accuracy is that of all answers, and eval/pass@k says how often one of k answers is right."""

    @field_validator("more")
    @classmethod
    def _names_are_of_metrics(cls, value: dict[str, Path]) -> dict[str, Path]:
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a metric; use letters, digits, . _ and -")
        return value

    @property
    def datasets(self) -> dict[str, DatasetConfig]:
        """All held-out rows by name, which for those of `dataset` is empty."""
        others = {name: self.dataset.model_copy(update={"path": path}) for name, path in self.more.items()}
        return {"": self.dataset, **others}

    @property
    def frequency(self) -> Frequency:
        """When an evaluation is due."""
        return Frequency(steps=self.every_steps, passes=self.every_epochs, seconds=self.every_seconds)
