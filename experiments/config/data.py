"""What is learned from: one JSON object a line, with a prompt and, where reward or loss want one, an answer."""

from pathlib import Path

from pydantic import Field

from corral.experiments.config.base import FrozenConfig

HELD_OUT_ANSWERS = "held_out_answers"
"""What a call that evaluates by answering problems is implemented by."""


class DatasetConfig(FrozenConfig):
    """A jsonl file; every row is checked before anything is submitted."""

    path: Path
    """File with one JSON object a line."""
    prompt_key: str = Field(default="prompt", min_length=1)
    """Field that holds the prompt, a non-empty string."""
    answer_key: str = Field(default="answer", min_length=1)
    """Field that holds the reference answer, a string."""
    id_key: str = Field(default="id", min_length=1)
    """Field that identifies the row; a row without it is known by its line number, counted from 0."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens; a longer one is refused at submission, and one that an agent makes is dropped."""
    shuffle: bool = True
    """Whether each pass over the data has an order of its own, drawn from the trial's seed."""


class EvaluationConfig(FrozenConfig):
    """Held-out problems, answered greedily by the weights under training."""

    dataset: DatasetConfig
    """The held-out problems."""
    every_steps: int = Field(default=20, ge=1)
    """Train steps from one evaluation to the next; the first is before the first step, the last after the last one."""
    batch_size: int = Field(default=64, ge=1)
    """Problems that all ranks together answer at a time."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Longest answer in tokens."""
