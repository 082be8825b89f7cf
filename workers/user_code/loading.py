"""`package.module:name` in a configuration -> the function or class of the user's own, as the trial has kept it."""

import hashlib
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from corral.experiments.errors import NO_SOURCE, ChangedInputError, did_you_mean
from corral.experiments.loading.validation import explain


class ChangedCodeError(ChangedInputError):
    """A kept file is not what it was when the trial was submitted or resumed."""


def use_kept_code(folder: Path, digests: Mapping[str, str]) -> None:
    """Guarantee: a trial runs the code that it was submitted with, wherever its workers start and whatever lies there.

    Args:
        digests: SHA-256 of the kept files, by name; nothing happens if there are none.

    Raises:
        ChangedCodeError: naming the file and the way out.
    """
    if not digests:
        return
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file():
            raise ChangedCodeError(f"{path}, code that the trial was started with, is gone; put the file back")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ChangedCodeError(
                f"{path} is not what the trial was started with; stop the trial, and rl-submit --resume tries the code "
                "as it is now and goes on with it"
            )
    sys.path.insert(0, str(folder))


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
        known = vars(module)  # what is looked up when it is asked for is in dir() alone
        there = [word for word in dir(module) if callable(known.get(word, print)) and not word.startswith("_")]
        raise NoSuchNameError(
            f"{import_path!r} names no function: {module.__file__ or module_name} has no callable {name!r}",
            hint=did_you_mean(name, there, f"it has {', '.join(there[:8]) or 'none'}"),
        )
    loaded: Callable[..., Any] = found
    return loaded


def configured(found: Any, settings: Mapping[str, Any], *, key: str) -> Any:
    """A configuration class with its settings; what is no class as it is, if it is given none.

    Args:
        key: of the configuration, where the settings stand.

    Raises:
        ValueError: naming the setting, if it is not one of the class's fields or not of its type.
    """
    if not isinstance(found, type):
        if settings:
            raise ValueError(
                f"{key} has {', '.join(settings)}, and {getattr(found, '__name__', found)!r} is no class with fields; "
                "make it a FrozenConfig whose instances are called, or remove the settings"
            )
        return found
    try:
        return found(**settings)
    except ValidationError as error:
        model = found if issubclass(found, BaseModel) else BaseModel
        problems = explain(error, model, NO_SOURCE)
        wrong = (f"{one.message} ({one.hint})" if one.hint else one.message for one in problems)
        raise ValueError(f"{key}: {', '.join(wrong)}") from error


def built_in_or_loaded(name: str, built_in: Mapping[str, Any], *, what: str) -> Any:
    """What has this name, or what this import path names; raises as `load_callable` does, too.

    Raises:
        ValueError: if there is none of this name.
    """
    if ":" in name:
        return load_callable(name)
    if name not in built_in:
        raise ValueError(f"there is no {what} {name!r}; there are {', '.join(built_in)} and import paths")
    return built_in[name]
