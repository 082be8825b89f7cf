"""What the configuration classes look like: class + key path -> the class, field or type that stands there.

Error messages, overrides, relative paths and the generated reference all ask here, so that the classes stay the only
description of the schema.
"""

import ast
import functools
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from corral.experiments.errors import KeyPath


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, without None and annotations; one type is a union of one."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(
            member for part in get_args(annotation) for member in alternatives(part) if member is not type(None)
        )
    return (annotation,)


def submodel(annotation: Any) -> type[BaseModel] | None:
    """The configuration class among the alternatives of an annotation."""
    for member in alternatives(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def entries(annotation: Any) -> type[BaseModel] | None:
    """The configuration class of the values of a mapping, whose names are the user's."""
    for member in alternatives(annotation):
        if get_origin(member) is dict:
            return submodel(get_args(member)[1])
    return None


def names_of_entries(annotation: Any) -> tuple[str, ...]:
    """The names that a mapping may have, where they are not the user's to choose."""
    for member in alternatives(annotation):
        if get_origin(member) is dict and get_origin(get_args(member)[0]) is Literal:
            return get_args(get_args(member)[0])
    return ()


def field_at(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """The field at a key path, or that whose name of the user's stands there; None where the schema has none (unknown
    keys, items of lists and of mappings to anything else)."""
    return _walk(model, path)[0]


def model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The configuration class whose keys stand below a key path."""
    return _walk(model, path)[1]


def _walk(model: type[BaseModel], path: KeyPath) -> tuple[FieldInfo | None, type[BaseModel] | None]:
    current: type[BaseModel] | None = model
    field: FieldInfo | None = None
    for part in path:
        if current is None and field is not None:
            current = entries(field.annotation)
            if current is None:
                return None, None
            continue
        field = current.model_fields.get(part) if current is not None and isinstance(part, str) else None
        if field is None:
            return None, None
        current = submodel(field.annotation)
    return field, current


def key_paths(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every key of the schema with its field, depth first in the order of the classes."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield path, field
        if (below := submodel(field.annotation)) is not None:
            yield from key_paths(below, path)
            continue
        below = entries(field.annotation)
        for name in names_of_entries(field.annotation) or ("NAME",) * (below is not None):
            yield from key_paths(below, (*path, name)) if below is not None else [((*path, name), field)]


def accepts(field: FieldInfo | None, kind: Any) -> bool:
    """Whether `kind` is one of the field's alternatives."""
    return field is not None and kind in alternatives(field.annotation)


def purpose(model: type[BaseModel], path: KeyPath) -> str:
    """What the key at a path is for, on one line, with the words of the file; empty if nobody says it."""
    above = model_at(model, path[:-1])
    text = _docstrings(above).get(str(path[-1]), "") if path and above is not None else ""
    return re.sub(r"\bNone\b", "null", " ".join(text.split())).rstrip(".")


@functools.cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """What stands under each field of a class and of its bases.

    Read from the source once somebody asks. Pydantic would do it (`use_attribute_docstrings`) for every class in every
    process that imports one, which is a quarter of the time of that import.
    """
    found: dict[str, str] = {}
    for holder in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(holder))).body
        for field, text in itertools.pairwise(cast(ast.ClassDef, definition).body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    found[name] = docstring
    return found


def json_schema(experiments: Mapping[str, type[BaseModel]], *, filled_in: type[BaseModel]) -> dict[str, Any]:
    """JSON Schema of experiment files, by which an editor completes and checks keys.

    Args:
        experiments: the class of each value of the file's `experiment`.
        filled_in: the class whose defaults follow from where it stands, so that a file may leave out any of its keys.
    """
    definitions: dict[str, Any] = {}
    branches: list[dict[str, Any]] = []
    for name, model in experiments.items():
        schema = model.model_json_schema()
        definitions |= schema.pop("$defs", {})
        definitions[model.__name__] = schema
        kind = {"properties": {"experiment": {"const": name}}, "required": ["experiment"]}
        branches.append({"if": kind, "then": {"$ref": f"#/$defs/{model.__name__}"}})
        below = (submodel(field.annotation) or entries(field.annotation) for _, field in key_paths(model))
        for one in dict.fromkeys([model, *filter(None, below)]):
            _describe(definitions[one.__name__], one)
    definitions[filled_in.__name__].pop("required", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "experiment of corral",
        "type": "object",
        "required": ["experiment"],
        "properties": {"experiment": {"anyOf": [{"enum": list(experiments)}, {"type": "string", "pattern": ":"}]}},
        "allOf": branches,
        "$defs": definitions,
    }


def _describe(definition: dict[str, Any], model: type[BaseModel]) -> None:
    """Each key with its purpose. A key that a rule of its own reads before the check may be text; so may its parts."""
    definition["description"] = " ".join((model.__doc__ or "").split())
    for name, field in model.model_fields.items():
        key = definition["properties"][name]
        if any(isinstance(rule, BeforeValidator) for rule in field.metadata):
            kinds = key.pop("anyOf", None) or [{one: key.pop(one) for one in list(key) if one not in _OF_KEY}]
            parts = [one for one in kinds if isinstance(one.get("additionalProperties"), dict)]
            for one in parts:
                one["additionalProperties"] = {"anyOf": [one["additionalProperties"], _TEXT]}
            key["anyOf"] = kinds if _TEXT in kinds else [*kinds, _TEXT]
        key["description"] = purpose(model, (name,)) + "."


_TEXT = {"type": "string"}
_OF_KEY = ("title", "default", "description")
