"""`package.module:name` -> whether it exists, without running any code of it.

Importing it at submission would start torch in most users' modules; so the module's file is found and its text read.
"""

import ast
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from corral.experiments.errors import ConfigProblem, did_you_mean, display_path


def check_import_path(import_path: str, *, must_be_async: bool = False) -> ConfigProblem | None:
    """What is wrong with `package.module:name`; None if the module can be found and defines the name.

    The current directory is searched too: that is where workers start.
    """
    module, _, name = import_path.partition(":")
    spec = find_module(module)
    if spec is None:
        hint = f"run rl-submit in the folder that holds {module.partition('.')[0]}, or install it into this environment"
        return ConfigProblem(message=f"there is no module {module!r}", hint=hint)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None  # an extension or a bare namespace package: only importing it could tell
    return _check_name(Path(spec.origin), name, must_be_async=must_be_async)


def find_module(module: str) -> ModuleSpec | None:
    """Where a module would be imported from; unlike importlib.util.find_spec it imports no package above it."""
    locations: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find_one(".".join(parts[:depth]), locations)
        if spec is None:
            return None
        if depth < len(parts) and spec.submodule_search_locations is None:
            return None
        locations = list(spec.submodule_search_locations or [])
    return spec


def _find_one(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    if locations is None and (spec := PathFinder.find_spec(name, [str(Path.cwd())])) is not None:
        return spec
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        try:
            spec = find_spec(name, locations) if find_spec is not None else None
        except KeyError:  # a folder without __init__.py inside another one, which only an import would make known
            folders = [
                str(path) for place in locations or [] if (path := Path(place, name.rpartition(".")[2])).is_dir()
            ]
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = folders
        if isinstance(spec, ModuleSpec):
            return spec
    return None


def _check_name(file: Path, name: str, *, must_be_async: bool) -> ConfigProblem | None:
    shown = display_path(file)
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ConfigProblem(message=f"cannot read {shown}: {error}", hint="it must be valid Python")
    definitions = find_definitions(tree)
    if name not in definitions:
        if "*" in definitions or "__getattr__" in definitions:
            return None
        listed = ", ".join(sorted(word for word in definitions if not word.startswith("_"))[:8])
        hint = did_you_mean(name, sorted(definitions), f"it defines {listed or 'nothing'}")
        return ConfigProblem(message=f"{shown} defines no {name!r}", hint=hint)
    if must_be_async and isinstance(definitions[name], ast.FunctionDef):
        return ConfigProblem(
            message=f"{name} in {shown} is not an async function", hint=f"write 'async def {name}(...)'"
        )
    return None


def find_definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Names that the module's top level binds, also under `if` and `try`; "*" for a star import."""
    definitions: dict[str, ast.stmt] = {}
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        statement = waiting.pop()
        for name in _bound_names(statement):
            definitions[name] = statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            waiting += _statements_below(statement)
    return definitions


def _statements_below(node: ast.AST) -> list[ast.stmt]:
    children = list(ast.iter_child_nodes(node))
    inside_handlers = [
        child for handler in children if isinstance(handler, ast.ExceptHandler) for child in handler.body
    ]
    return [*(child for child in children if isinstance(child, ast.stmt)), *inside_handlers]


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []
