"""A file system that refuses, as a full or lost one does: `{trial}/trouble.json` says which files, and how; or one that
hangs, as a file server that is gone.

{"error": "ENOSPC", "paths": ["events.jsonl"]}      an error's name, or RuntimeError for a fault of ours
"""

import builtins
import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corral.experiments.trial.directory import TrialDirectory


def break_files(directory: TrialDirectory, error: str, *paths: str) -> None:
    """From now on the files of these paths, relative to the trial's folder, cannot be opened by its supervisor."""
    temporary = directory.path / "trouble.tmp"
    temporary.write_text(json.dumps({"error": error, "paths": paths}))
    temporary.rename(directory.path / "trouble.json")


def mend_files(directory: TrialDirectory) -> None:
    (directory.path / "trouble.json").unlink()


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Whoever opens this file meanwhile gets no answer: a pipe that nobody writes to stands for a lost file server."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    try:
        yield
    finally:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # whoever still waits may go


def install(trial: Path) -> None:
    """Lets this process feel it."""
    really_open = io.open

    def trouble_with(path: object) -> Exception | None:
        if not isinstance(path, str | os.PathLike) or not str(path).startswith(f"{trial}/"):
            return None
        try:
            with really_open(trial / "trouble.json") as file:
                trouble = json.load(file)
        except FileNotFoundError:
            return None
        name = str(path).removeprefix(f"{trial}/")
        if not any(name.startswith(wanted) for wanted in trouble["paths"]):
            return None
        if trouble["error"] == "RuntimeError":
            return RuntimeError("a fault")
        number = getattr(errno, trouble["error"])
        return OSError(number, os.strerror(number), str(path))

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if (error := trouble_with(path)) is not None:
                raise error
            return function(path, *arguments, **options)

        return call

    os.open = guarded(os.open)
    builtins.open = io.open = guarded(really_open)
