"""The base of every configuration class: frozen, strict about keys, documented under each field."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")


class FrozenConfig(BaseModel):
    """A configuration that is checked once, before submission, and never changed afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def parts_of(value: object, kind: type[T]) -> Iterator[T]:
    """What there is of a kind in a configuration."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from parts_of(getattr(value, name), kind)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from parts_of(one, kind)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from parts_of(one, kind)


def changed(config: BaseModel, names: Iterable[str]) -> list[str]:
    """The fields whose value differs from the default."""
    return [name for name in names if getattr(config, name) != type(config).model_fields[name].default]


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, mapping by mapping."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both
