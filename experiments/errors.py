"""Errors of an experiment, each with a remedy: ConfigProblem (one) -> ConfigError (all of them).

error: trial can never start: it needs 5 nodes, partition 'h100' has 4
  math.yaml:31  groups.rollout_worker.count: 40  (8 a node)
  hint: a count of 32 fits
  checked with: sinfo -h -N -p h100 -o '%N|%c|%m|%G|%t'
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from corral.experiments.exit_codes import CommandExit
from corral.scheduling.errors import RuleError

KeyPath = tuple[str | int, ...]
"""Where a value stands in an experiment file: ("actor", "optimizer", "lr"); list items by their index."""

_MAX_SHOWN_VALUE = 100  # characters; an error fits on one screen


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One mistake.

    message: what is wrong and by which rule.
    hint: the way out.
    path: the key that has to change; empty where no key is to blame.
    shown: the offending value, as it is printed after the key; see `showing`.
    note: what follows from the value, in a few words beside it.
    place: where that stands: "math.yaml:31", "-s ppo.kl.coef=1".
    evidence: the command that shows what the value was compared with.
    is_of_running: whether the trial could be planned nevertheless: what is missing is needed by its processes only.
    """

    message: str
    hint: str = ""
    _: KW_ONLY
    path: KeyPath = ()
    shown: str = ""
    note: str = ""
    place: str = ""
    evidence: str = ""
    is_of_running: bool = False

    def showing(self, config: object) -> "ConfigProblem":
        """The same beside the value that stands at its key in a configuration, unless that holds further keys."""
        value = config
        for part in self.path:
            value = dict(enumerate(value)) if isinstance(value, list | tuple) else value
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, str(part), None)
        is_shown = self.shown or not isinstance(value, str | int | float | Path | list | tuple)
        return self if is_shown else replace(self, shown=show_value(value))

    def render(self) -> str:
        """The problem on two to four lines."""
        first, *more = self.message.splitlines() or [""]
        lines = [f"error: {first}", *(f"  {line}" for line in more)]
        key = dotted(self.path)
        value = f"{key}: {self.shown}" if key and self.shown else key or self.shown
        note = f"({self.note})" if self.note else ""
        if location := "  ".join(part for part in (self.place, value, note) if part):
            lines.append(f"  {location}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        if self.evidence:
            lines.append(f"  checked with: {self.evidence}")
        return "\n".join(lines)


class ConfigError(ValueError):
    """An experiment that cannot be run as it is written; nothing was submitted."""

    exit_code = CommandExit.BAD_CONFIGURATION

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems: tuple[ConfigProblem, ...] = tuple(problems)
        if not self.problems:
            raise TypeError("a ConfigError needs at least one problem")
        super().__init__("\n".join(problem.render() for problem in self.problems))

    @classmethod
    def of(cls, message: str, *, hint: str = "", path: KeyPath = (), shown: str = "", place: str = "") -> Self:
        """An error with one problem."""
        return cls([ConfigProblem(message=message, hint=hint, path=path, shown=shown, place=place)])

    def located(self, source: "ConfigSource") -> Self:
        """The same error with a place for every problem that has none yet: its key's, or the file."""
        return type(self)(
            problem if problem.place else replace(problem, place=source.place(problem.path))
            for problem in self.problems
        )


class UnsatisfiableError(ConfigError):
    """An experiment that is right in itself, but that this cluster can never run."""

    exit_code = CommandExit.REFUSED


class Location(NamedTuple):
    """A line of a file, from 1."""

    file: Path
    line: int
    written: str = ""
    """The scalar without quotes that stands there, as it is written: 0123, which is 123."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """Where each value of a configuration came from: a line of a file, or an override on the command line.

    file: the experiment file.
    location_by_path: where each key stands that a file gives, the experiment file or a profile.
    override_by_path: the option of the command line that gave a key: "-s launch.qos=q", "--sbatch-arg=--nice".
    profiles: the profiles that were read, the weakest first.
    """

    file: Path | None = None
    location_by_path: Mapping[KeyPath, Location] = field(default_factory=dict)
    override_by_path: Mapping[KeyPath, str] = field(default_factory=dict)
    profiles: tuple[Path, ...] = ()

    def place(self, path: KeyPath) -> str:
        """Where `path` was written, or else an override of something in it, or the nearest thing that encloses it."""
        if path and not self.gives(path):
            for inner, override in self.override_by_path.items():
                if inner[: len(path)] == path:
                    return shorten(override)
        for length in range(len(path), 0, -1):
            prefix = path[:length]
            if prefix in self.override_by_path:
                return shorten(self.override_by_path[prefix])
            if prefix in self.location_by_path:
                file, line, _ = self.location_by_path[prefix]
                return f"{display_path(file)}:{line}"
        return display_path(self.file) if self.file is not None else ""

    def written(self, path: KeyPath) -> str:
        """A scalar as a file has it at this key, without quotes; "" if it is quoted, or nobody knows."""
        is_of_file = path in self.location_by_path and not self._is_overridden(path)
        return self.location_by_path[path].written if is_of_file else ""

    def _is_overridden(self, path: KeyPath) -> bool:
        return any(path[:length] in self.override_by_path for length in range(1, len(path) + 1))

    def gives(self, path: KeyPath) -> bool:
        """Whether a file or an override has this very key."""
        return path in self.location_by_path or path in self.override_by_path

    def first_given(self, *paths: KeyPath) -> KeyPath:
        """The first of the keys that is given, else the first: what to change, of several that decide together."""
        return next((path for path in paths if self.gives(path)), paths[0])

    def folder(self, path: KeyPath) -> Path:
        """What a relative path at this key is relative to: the folder of its file, or the current directory."""
        if self._is_overridden(path):
            return Path.cwd()
        file = self.location_by_path[path].file if path in self.location_by_path else self.file
        return file.parent if file is not None else Path.cwd()


@contextmanager
def located(source: ConfigSource, config: object = None) -> Iterator[None]:
    """What is raised in here says where the keys that it names stand, and which values of a configuration they have."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(problem.showing(config) for problem in error.problems).located(source) from error


NO_SOURCE = ConfigSource()


def dotted(path: KeyPath) -> str:
    """The key path as it is written in an override: `actor.optimizer.lr`."""
    return ".".join(str(part) for part in path)


def leaves(content: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value of nested mappings that is none itself, with the keys that lead to it."""
    if not isinstance(content, Mapping):
        yield path, content
        return
    for key, below in content.items():
        yield from leaves(below, (*path, key))


def show_value(value: Any) -> str:
    """A value as one would write it in the file, short enough for a line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Path):
        return shorten(display_path(value))
    if isinstance(value, str) and value.isprintable() and value == value.strip() and value:
        return shorten(value)
    if isinstance(value, Mapping):
        return shorten("{" + ", ".join(f"{key}: {show_value(item)}" for key, item in list(value.items())[:8]) + "}")
    if isinstance(value, list | tuple):
        return shorten("[" + ", ".join(show_value(item) for item in value[:8]) + "]")
    return shorten(repr(value))


def shorten(text: str) -> str:
    """`text` on one line, cut where it is too long to be shown."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= _MAX_SHOWN_VALUE else f"{text[: _MAX_SHOWN_VALUE - 3]}..."


def display_path(path: Path) -> str:
    """The shorter of the path itself and the path from the current directory."""
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):  # the current directory may have been removed
        return str(path)
    return min(str(path), relative, key=len)


def closest(word: str, candidates: Sequence[str]) -> str | None:
    """The candidate that `word` was most likely meant to be, if one is near."""
    # Most runs have no mistake to explain, and difflib is not free to import.
    from difflib import get_close_matches

    matches = get_close_matches(word, candidates, n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(word: str, candidates: Sequence[str], otherwise: str) -> str:
    """A hint that names the nearest candidate, or says what else helps."""
    near = closest(word, candidates)
    return f"did you mean {near!r}?" if near else otherwise


class ChangedInputError(RuleError):
    """A file that the trial was planned with is not there any more, or has changed."""
