"""`package.module:name` in a configuration -> the function or class of the user's own."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def load_callable(import_path: str) -> Callable[..., Any]:
    """What the import path names.

    Raises:
        ValueError: if the module has no such function or class.
        ImportError: if there is no such module.
    """
    module_name, _, name = import_path.partition(":")
    found = getattr(import_module(module_name), name, None)
    if not callable(found):
        raise ValueError(f"{import_path!r} names no function: module {module_name} has no callable {name!r}")
    loaded: Callable[..., Any] = found
    return loaded
