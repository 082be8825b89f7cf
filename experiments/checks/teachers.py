"""Checks of those that are learned from: teachers that read what the actor writes, and are there for every row."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from corral.experiments.config.data import DatasetConfig
from corral.experiments.config.model import ModelConfig
from corral.experiments.errors import ConfigProblem
from corral.experiments.inputs.model_directory import model_sizes, read_vocabulary


def check_teachers(
    teachers: Mapping[str, Path | None],
    actor: ModelConfig,
    *,
    names: Sequence[str],
    sources: Collection[str],
    top_k: int | None,
) -> Iterator[ConfigProblem]:
    """What is wrong with teachers and the rows that they judge.

    Args:
        teachers: the directories of all of them, as far as they are known, by the key of the file that describes each.
        names: of the sources of rows that teachers judge one each.
        sources: of rows.
        top_k: how many of its own tokens each tells the actor; None for the probabilities of the actor's.
    """
    for key, path in teachers.items():
        if path is not None:
            yield from _check_one(path, actor.path, key=key, top_k=top_k)
    if teachers and top_k is not None and actor.shared_prompts != "off":
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
    if names and set(names) != set(sources):
        yield ConfigProblem(
            f"teachers are named {', '.join(names)}, and dataset.sources {', '.join(sources) or 'nothing'}: each "
            "source has one",
            "name teachers as the sources, or give one `teacher` of all rows",
            path=("teachers",),
        )


def check_served_teachers(
    keys: Collection[str], *, temperature: float, has_row_temperatures: bool, top_k: int | None
) -> Iterator[ConfigProblem]:
    """What teachers outside of the trial cannot say.

    Args:
        keys: of the file, that describe them.
        temperature: that answers are sampled with.
    """
    if keys and temperature != 1.0:
        yield ConfigProblem(
            f"{', '.join(keys)} says log-probabilities at temperature 1, as servers give those of prompts, and answers "
            f"are sampled at {temperature:g}",
            "sample at 1, or take a `teacher` of the trial",
            path=("rollout", "sampling", "temperature"),
        )
    if keys and has_row_temperatures:
        yield ConfigProblem(
            f"{', '.join(keys)} says log-probabilities at temperature 1, and rows say at which answers are sampled",
            "leave out columns.temperature of dataset, or take a `teacher` of the trial",
            path=("dataset",),
        )
    if keys and top_k is not None:
        yield ConfigProblem(
            f"{', '.join(keys)} says how likely given tokens are, and cannot name others by their ids",
            "leave out ppo.distillation.top_k, or take a `teacher` of the trial",
            path=("ppo", "distillation", "top_k"),
        )


def check_teacher_prompts(dataset: DatasetConfig, *, makes_episodes: bool) -> Iterator[ConfigProblem]:
    """Prompts for teachers that cannot take a prompt's place."""
    if dataset.has_teacher_prompts and makes_episodes:
        yield ConfigProblem(
            "columns.teacher_prompt takes the place of the prompt, and what agents and environments make may begin "
            "with something else",
            "remove it, or answer in a single turn: without rollout.agent and rollout.environment",
            path=("dataset",),
        )


def _check_one(teacher: Path, actor: Path, *, key: str, top_k: int | None = None) -> Iterator[ConfigProblem]:
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
