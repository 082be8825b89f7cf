"""The keys that a file of the user's own declares, without running any code of it.

    my_pkg/margin.py:  MARGIN = Key("margin", "per_answer", "float32")      ──►  [Key(...)]  ──► the plan
                       mine = PolicyLoss(_mine, inputs=(MARGIN,))           ──►  ("margin",) ──► the calls that run it

Importing the file would start torch in most users' modules, here and in the master. So its text is read, and a `Key` is
written with three plain strings. A model worker, which does import the file, compares.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from corral.experiments.errors import ConfigError, ConfigProblem, display_path
from corral.experiments.inputs.import_paths import check_import_path, find_definitions, find_module
from corral.scheduling.graph_keys import graph_keys
from corral.scheduling.keys import Key
from corral.scheduling.model_function_call import CallType, ModelFunctionCall


def read_declared_keys(import_path: str) -> tuple[list[Key], list[ConfigProblem]]:
    """Every `Key(...)` in the file of `package.module:name`, and what is wrong with the path or with one of them."""
    if problem := check_import_path(import_path):
        return [], [problem]
    path = _source(import_path)
    if path is None:
        return [], []
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


def names_of_keys(
    import_path: str, attribute: Literal["inputs", "outputs"], call_type: CallType | None = None
) -> tuple[str, ...]:
    """The keys that a class, or a function with its keys, says it reads or makes, each once.

    Args:
        import_path: of the class or the wrapped function; a name that corral has declares nothing here.
        call_type: of a class, which has them by the type of the call.

    Raises:
        ValueError: naming the line of one that cannot be read as text.
    """
    path = _source(import_path) if ":" in import_path else None
    if path is None or check_import_path(import_path) is not None:  # which its own check reports
        return ()
    definitions = find_definitions(ast.parse(path.read_bytes()))
    names: list[str] = []
    for value in _values_of(definitions[import_path.partition(":")[2]], attribute):
        try:
            names += _names(_of_call(value, call_type), definitions)
        except ValueError as error:
            raise ValueError(f"{display_path(path)}:{value.lineno}: {attribute} {error}") from error
    return tuple(dict.fromkeys(names))


def keys_of_graph(
    calls: Sequence[ModelFunctionCall],
    dataset_keys: Iterable[str],
    others: Iterable[str] = (),
    given: Iterable[Key] = (),
) -> tuple[Key, ...]:
    """The keys of a graph that are not built in; see `graph_keys`.

    Args:
        others: import paths of what else declares keys: losses and advantages.
        given: keys that everybody knows besides, since they follow from the configuration.

    Raises:
        ConfigError: if a file that one of them names cannot be found, or declares a key that cannot be read.
        ValueError: if nobody declares a key, or two do so in different ways.
    """
    declared: dict[str, list[Key]] = {}
    problems: list[ConfigProblem] = []
    for import_path in dict.fromkeys([*(call.implementation for call in calls), *others]):
        if ":" in import_path:
            declared[import_path], found = read_declared_keys(import_path)
            problems += found
    if problems:
        raise ConfigError(problems)
    return graph_keys(calls, declared, dataset_keys, given=given)


def _source(import_path: str) -> Path | None:
    """The file of a module; None for a compiled one, which declares nothing that could be read."""
    spec = find_module(import_path.partition(":")[0])
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def _values_of(definition: ast.stmt, attribute: str) -> Iterator[ast.expr]:
    """What stands for `attribute` in a class, as a property or not, or in the call that wraps a function."""
    if isinstance(definition, ast.ClassDef):
        for statement in definition.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == attribute:
                returns = [node for node in ast.walk(statement) if isinstance(node, ast.Return)]
                yield from (node.value for node in returns if node.value is not None)
            elif attribute in _targets(statement) and isinstance(statement, ast.Assign | ast.AnnAssign):
                yield from [statement.value] if statement.value is not None else []
    value = definition.value if isinstance(definition, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Call):
        yield from (keyword.value for keyword in value.keywords if keyword.arg == attribute)


def _targets(statement: ast.stmt) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _of_call(value: ast.expr, call_type: CallType | None) -> ast.expr | None:
    """Of `{CallType.INFERENCE: (...), ...}` what stands for this type."""
    if call_type is None or not isinstance(value, ast.Dict):
        return value
    names = (call_type.name, call_type.value)
    for key, its_keys in zip(value.keys, value.values, strict=True):
        if getattr(key, "attr", None) in names or getattr(key, "value", None) in names:
            return its_keys
    return None


def _names(value: ast.expr | None, definitions: Mapping[str, ast.stmt]) -> list[str]:
    """The names of the keys in an expression of Key(...), built_in(...), and names of such on the module's level."""
    if value is None:
        return []
    if isinstance(value, ast.Tuple | ast.List):
        return [name for element in value.elts for name in _names(element, definitions)]
    if isinstance(value, ast.Starred):
        return _names(value.value, definitions)
    if isinstance(value, ast.BinOp):
        return [*_names(value.left, definitions), *_names(value.right, definitions)]
    if isinstance(value, ast.Call) and _name_of(value.func) == "Key":
        return [_key(value).name]
    if isinstance(value, ast.Call) and _name_of(value.func) == "built_in":
        return [str(argument.value) for argument in value.args if isinstance(argument, ast.Constant)]
    assigned = definitions.get(value.id) if isinstance(value, ast.Name) else None
    if isinstance(assigned, ast.Assign | ast.AnnAssign):
        return _names(assigned.value, {name: d for name, d in definitions.items() if d is not assigned})
    raise ValueError(
        f"cannot be read as text: {ast.unparse(value)}; write Key(...) with three plain strings, built_in(...), or the "
        "name of one of these in the same file"
    )


def _name_of(function: ast.expr) -> str:
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _key(call: ast.Call) -> Key:
    arguments: dict[str, ast.expr] = dict(zip(("name", "layout", "dtype", "shape"), call.args, strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    texts = {name: value.value for name, value in arguments.items() if isinstance(value, ast.Constant)}
    are_plain = (
        arguments.keys()
        == {"name", "layout", "dtype"}
        == {name for name, text in texts.items() if isinstance(text, str)}
    )
    if not are_plain:
        raise ValueError("a Key has a name, a layout and a type, each a plain string, so that it can be read as text")
    return Key(str(texts["name"]), str(texts["layout"]), str(texts["dtype"]))
