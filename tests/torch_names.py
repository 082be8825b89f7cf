"""The names and keywords of torch that this repository uses, as each supported version of torch has them.

    PYTHONPATH=DIR_WITH_THAT_TORCH python -m tests.torch_names     writes tests/torch_names/VERSION.txt

A line is a name and its parameters, `?` where torch does not tell them. `test_torch_versions.py` compares, on whatever
torch is installed and without a network. Left out are `torch_versions.py` and `varlen_torch_versions.py`, whose purpose
is what differs, and what runs in SGLang's own environment, with its own torch.
"""

import ast
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
LISTS = Path(__file__).with_name("torch_names")
_LOOKED_AT = ("workers", "benchmarks/gpu", "benchmarks/training", "tests/gpu")
_LEFT_OUT = ("torch_versions.py", "cpu_stand_ins/sitecustomize.py")
_UNTOLD = "?"


def names_in_use() -> dict[str, set[str]]:
    """Every name of torch in the sources, and the keywords that it is called with; `torch.Tensor.x` for methods."""
    keywords_by_name: defaultdict[str, set[str]] = defaultdict(set)
    for folder in _LOOKED_AT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.as_posix().endswith(_LEFT_OUT):
                for name, keywords in _uses(ast.parse(path.read_text())):
                    keywords_by_name[name] |= keywords
    return dict(keywords_by_name)


def _uses(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    name_by_alias: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    name_by_alias[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            name_by_alias |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from ((name, set()) for name in name_by_alias.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if name := _named(node, name_by_alias):
                yield name, set()
            elif hasattr(torch.Tensor, node.attr) and not hasattr(object, node.attr):
                yield f"torch.Tensor.{node.attr}", set()
        elif isinstance(node, ast.Call) and (name := _named(node.func, name_by_alias)):
            yield name, {keyword.arg for keyword in node.keywords if keyword.arg}


def _named(node: ast.expr, name_by_alias: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return name_by_alias.get(node.id)
    if isinstance(node, ast.Attribute) and (base := _named(node.value, name_by_alias)):
        return f"{base}.{node.attr}"
    return None


def parameters_of(name: str) -> list[str] | None:
    """The parameters of what the installed torch has by this name; None where it has nothing."""
    parts = name.split(".")
    found: object = torch
    for depth, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:depth]))
            except ImportError:
                return None
        found = getattr(found, part, None)
    if not callable(found):
        return [_UNTOLD]
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return [_UNTOLD]
    return [_UNTOLD if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters]


def read_list(path: Path) -> dict[str, list[str]]:
    """What `main` wrote: parameters by name."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {name: parameters for name, *parameters in lines}


def mistakes(known: dict[str, list[str]], used: dict[str, set[str]]) -> list[str]:
    """Names in use that a version lacks, and keywords that it does not take."""
    lacking = [f"{name} does not exist" for name in sorted(used.keys() - known.keys())]
    refused = [
        f"{name} has no keyword {keyword}"
        for name in sorted(used.keys() & known.keys())
        for keyword in sorted(used[name])
        if _UNTOLD not in known[name] and keyword not in known[name]
    ]
    return lacking + refused


def main() -> None:
    version = torch.__version__.split("+")[0]
    parameters_by_name = {name: parameters_of(name) for name in sorted(names_in_use())}
    lines = [" ".join((name, *found)) for name, found in parameters_by_name.items() if found is not None]
    (LISTS / f"{version}.txt").write_text("\n".join(lines) + "\n")
    print(f"{version}: {len(lines)} of {len(parameters_by_name)} names")


if __name__ == "__main__":
    main()
