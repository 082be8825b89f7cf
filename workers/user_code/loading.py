"""`package.module:name` in a configuration -> the function or class of the user's own."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from corral.experiments.errors import did_you_mean


class NoSuchNameError(ValueError):
    """A module has no function or class of a name."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def load_callable(import_path: str) -> Callable[..., Any]:
    """What the import path names.

    Raises:
        NoSuchNameError: if the module has no such function or class.
        ImportError: if there is no such module.
    """
    module_name, _, name = import_path.partition(":")
    module = import_module(module_name)
    found = getattr(module, name, None)
    if not callable(found):
        there = sorted(word for word, value in vars(module).items() if callable(value) and not word.startswith("_"))
        raise NoSuchNameError(
            f"{import_path!r} names no function: {module.__file__ or module_name} has no callable {name!r}",
            hint=did_you_mean(name, there, f"it has {', '.join(there[:8]) or 'none'}"),
        )
    loaded: Callable[..., Any] = found
    return loaded
