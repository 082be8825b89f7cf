"""`package.module:Class` of the user's own that has to run at submission -> the class, or what is wrong with it.

    experiment: my_pkg.mine:Mine ──► import, from users_root() too ──► a complete subclass
    what its methods raise ──naming_users_line──► ConfigError with the file and the line

Workers never import it: what it says is in the plan.
"""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from corral.experiments.config.rollout import check_import_path_syntax
from corral.experiments.errors import ConfigError, KeyPath, did_you_mean, display_path
from corral.experiments.inputs.users_process import add_users_root, check_not_hidden, users_root
from corral.scheduling.errors import RuleError, message_and_hint


def import_class(import_path: str, base: type, *, path: KeyPath) -> type[Any]:
    """The class of this import path, which can be made an instance of.

    Args:
        base: what it has to be derived from.
        path: the key that names it.

    Raises:
        ConfigError: if it is not there, cannot be imported, is not derived from `base`, or leaves methods undefined.
    """
    try:
        check_import_path_syntax(import_path)
    except ValueError as error:
        raise _refusal("", error, import_path, path) from error
    module_name, _, name = import_path.partition(":")
    module = _import(module_name, import_path, path)
    where = display_path(Path(module.__file__ or module_name))
    if not hasattr(module, name):
        defined = sorted(word for word in vars(module) if not word.startswith("_"))
        hint = did_you_mean(name, defined, f"it defines {', '.join(defined[:8]) or 'nothing'}")
        raise ConfigError.of(f"{where} defines no {name!r}", hint=hint, path=path, shown=import_path)
    found = getattr(module, name)
    if not isinstance(found, type) or not issubclass(found, base):
        what = "a class of another kind" if isinstance(found, type) else "no class"
        raise ConfigError.of(
            f"{where}: {name} is {what}, and has to be derived from {base.__module__}:{base.__name__}",
            hint="derive it from one of those that corral has, such as corral.experiments.row_experiment:SFTExperiment",
            path=path,
            shown=import_path,
        )
    if undefined := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError.of(
            f"{where}:{inspect.getsourcelines(found)[1]}: {name} does not define {', '.join(undefined)}",
            hint="define what is missing, or derive it from a class that has it",
            path=path,
            shown=import_path,
        )
    return found


@contextmanager
def naming_users_line(made_by: type, *, path: KeyPath, shown: str) -> Iterator[None]:
    """What a class of the user's own raises in here becomes a ConfigError that names the line; what corral's own raise
    because things that the user named do not fit each other, a ValueError, one without a line.

    Args:
        made_by: the class whose methods run in here.
        path: the key that names it.
    """
    module = sys.modules.get(made_by.__module__)
    file = getattr(module, "__file__", None)
    is_users = made_by.__module__.partition(".")[0] != __name__.partition(".")[0]
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if is_users:
            raise _refusal(_place(error, lambda name: name == file), error, shown, path) from error
        if isinstance(error, ValueError):
            raise _refusal("", error, "", ()) from error
        raise


def _import(module_name: str, import_path: str, path: KeyPath) -> ModuleType:
    path_before = list(sys.path)
    add_users_root()
    try:
        check_not_hidden(import_path, users_root())
        return import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            folder = f"the folder that holds {module_name.partition('.')[0]}"
            raise ConfigError.of(
                f"there is no module {module_name!r}",
                hint=f"run rl-submit in {folder}, or install it into this environment",
                path=path,
                shown=import_path,
            ) from error
        before = f"cannot import {module_name}: {_place(error, _is_imported)}"
        raise _refusal(before, error, import_path, path) from error
    finally:
        sys.path[:] = path_before


def _refusal(before: str, error: BaseException, shown: str, path: KeyPath) -> ConfigError:
    """What an error says, with its kind where that alone tells what it is about."""
    message, hint = message_and_hint(error)
    if isinstance(error, ValidationError):
        message = "; ".join(details["msg"].removeprefix("Value error, ") for details in error.errors())
    elif type(error) not in (ValueError, RuleError):
        message = f"{type(error).__name__}: {message}"
    return ConfigError.of(f"{before}{message}", hint=hint, path=path, shown=shown)


def _place(error: BaseException, is_users: Callable[[str], bool]) -> str:
    """The innermost line in a file of the user's that an error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{display_path(Path(frames[-1].filename))}:{frames[-1].lineno}: " if frames else ""


def _is_imported(file: str) -> bool:
    """Whether it is a file, and none of those that import others."""
    return Path(file).is_file() and file != __file__ and "importlib" not in Path(file).parts
