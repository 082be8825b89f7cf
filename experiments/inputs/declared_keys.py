"""The keys that a file of the user's own declares, without running any code of it.

    my_pkg/margin.py:  MARGIN = Key("margin", "per_answer", "float32")  ──►  [Key(...)]  ──► the plan

Importing the file would start torch in most users' modules, here and in the master. So its text is read, and a `Key` is
written with three plain strings. A model worker, which does import the file, compares.
"""

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

from corral.experiments.errors import ConfigError, ConfigProblem, display_path
from corral.experiments.inputs.import_paths import check_import_path, find_module
from corral.scheduling.graph_keys import graph_keys
from corral.scheduling.keys import Key
from corral.scheduling.model_function_call import ModelFunctionCall


def read_declared_keys(import_path: str) -> tuple[list[Key], list[ConfigProblem]]:
    """Every `Key(...)` in the file of `package.module:name`, and what is wrong with the path or with one of them."""
    if problem := check_import_path(import_path):
        return [], [problem]
    spec = find_module(import_path.partition(":")[0])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return [], []  # a compiled module declares nothing that could be read
    path = Path(spec.origin)
    keys: list[Key] = []
    problems: list[ConfigProblem] = []
    for call in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(call, ast.Call) and _name_of(call.func) == "Key":
            try:
                keys.append(_key(call))
            except ValueError as error:
                hint = 'for example Key("margin", "per_answer", "float32")'
                problems.append(ConfigProblem(message=f"{display_path(path)}:{call.lineno}: {error}", hint=hint))
    return keys, problems


def keys_of_graph(calls: Sequence[ModelFunctionCall], dataset_keys: Iterable[str]) -> tuple[Key, ...]:
    """The keys of a graph that are not built in; see `graph_keys`.

    Raises:
        ConfigError: if a file that an implementation names cannot be found, or declares a key that cannot be read.
        ValueError: if nobody declares a key, or two do so in different ways.
    """
    declared: dict[str, list[Key]] = {}
    problems: list[ConfigProblem] = []
    for implementation in dict.fromkeys(call.implementation for call in calls if ":" in call.implementation):
        declared[implementation], found = read_declared_keys(implementation)
        problems += found
    if problems:
        raise ConfigError(problems)
    return graph_keys(calls, declared, dataset_keys)


def _name_of(function: ast.expr) -> str:
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _key(call: ast.Call) -> Key:
    arguments: dict[str, ast.expr] = dict(zip(("name", "layout", "dtype"), call.args, strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    texts = {name: value.value for name, value in arguments.items() if isinstance(value, ast.Constant)}
    if texts.keys() != {"name", "layout", "dtype"} or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("a Key has a name, a layout and a type, each a plain string, so that it can be read as text")
    return Key(**{name: str(text) for name, text in texts.items()})
