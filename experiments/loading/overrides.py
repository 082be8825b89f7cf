"""`-s key.path=value` on the command line -> changed raw values; the schema then checks them like those of the file."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from corral.experiments.errors import ConfigError, ConfigProblem, KeyPath, dotted, shorten, show_value
from corral.experiments.loading.schema import accepts, field_at
from corral.experiments.loading.yaml_loader import parse_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One `key.path=value`: where it goes, the value as YAML reads it, and what was typed."""

    path: KeyPath
    value: Any
    typed: str

    @property
    def option(self) -> str:
        """As it stands on the command line, on one line."""
        return f"-s {shorten(self.typed)}"


def parse_override(typed: str) -> Override:
    """Read `actor.optimizer.lr=1e-4`; the value follows the rules of the file, so `null`, `[a, b]` and `"3"` work.

    Raises:
        ConfigError: if there is no `=`, a part of the key is empty, or the value is not YAML.
    """
    key, separator, text = typed.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not separator or not all(path):
        raise ConfigError.of(
            f"an override must look like key.path=value, got {shorten(typed)!r}",
            place=f"-s {shorten(typed)}",
            hint="for example -s actor.optimizer.lr=1e-4",
        )
    return Override(path=path, value=parse_value(text, place=f"-s {shorten(typed)}"), typed=typed)


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """`data` with the overrides put in, later ones last; keys need not exist yet, the schema judges them.

    Raises:
        ConfigError: if an override goes below something that is not a mapping.
    """
    result: dict[str, Any] = copy.deepcopy(dict(data))
    problems = [problem for override in overrides if (problem := _apply(result, override)) is not None]
    if problems:
        raise ConfigError(problems)
    return result


def value_at(data: Any, path: KeyPath, default: Any = None) -> Any:
    """The value at a key path of raw values."""
    for part in path:
        if not (part in data if isinstance(data, dict) else isinstance(data, list) and part in range(len(data))):
            return default
        data = data[part]
    return data


def _apply(data: dict[str, Any], override: Override) -> ConfigProblem | None:
    current = data
    for depth, part in enumerate(override.path[:-1], start=1):
        below = current.get(str(part))
        if below is None:
            below = current[str(part)] = {}
        if not isinstance(below, dict):
            above = dotted(override.path[:depth])
            return ConfigProblem(
                f"{above} has no key {override.path[depth]!r}: it is {show_value(below)}",
                f"set the whole value: -s {above}=...",
                path=override.path,
                place=override.option,
            )
        current = below
    current[str(override.path[-1])] = override.value
    return None


def as_text_where_asked(override: Override, model: type[BaseModel]) -> Override:
    """The override with its value as typed where the schema wants text: `-s launch.time_limit=30` needs no quotes."""
    field = field_at(model, override.path)
    wants_text = accepts(field, str) and not accepts(field, int)
    is_environment_variable = accepts(field_at(model, override.path[:-1]), dict[str, str])
    if type(override.value) in (int, float) and (wants_text or is_environment_variable):
        return Override(path=override.path, value=override.typed.partition("=")[2].strip(), typed=override.typed)
    return override
