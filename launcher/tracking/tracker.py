"""Tracker: receives a trial's numbers, line by line.

A tracker begins anew whenever it is made: it removes its earlier report of the trial, by its own means, and gets all
lines from the first on. So each line is there once, also after a crash, and after the trial has taken steps back.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec

from corral.experiments.errors import ConfigError
from corral.experiments.trial.directory import TrialDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedTrial:
    """The trial whose numbers a tracker receives."""

    experiment: str
    trial: str
    uuid: str
    """32 hex digits, the same over attempts and resumes."""
    config: Mapping[str, Any]
    """The experiment file with defaults, without environment variables: they may hold keys."""
    directory: TrialDirectory

    @classmethod
    def of(cls, directory: TrialDirectory) -> "TrackedTrial":
        """That of a folder.

        Raises:
            OSError, ValueError: if its plan cannot be read.
        """
        plan = msgspec.json.decode(directory.plan_path.read_bytes())
        identity = {name: plan["trial"][name] for name in ("experiment", "trial", "uuid")}
        return cls(**identity, config=_without_environment(plan["config"]), directory=directory)


class Tracker(Protocol):
    """One of the user's own is a class or function of this form, named by its import path."""

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Numbers of a train step, or of an evaluation of the policy after it, by their names.

        Args:
            time_s: when they were written, in seconds since 1970.
        """

    def flush(self) -> None:
        """What was added is to be seen; called every few seconds, also where nothing was."""

    def close(self) -> None:
        """Nothing more will come."""


class MakeTracker(Protocol):
    """Makes a tracker that has nothing yet."""

    def __call__(self, folder: Path, trial: TrackedTrial) -> Tracker:
        """
        Args:
            folder: the one that it may write into; it need not be there.
        """


def package(name: str, extra: str) -> Any:
    """A module of a tracker's package.

    Raises:
        ConfigError: if it is not there.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError.of(
            f"{extra} is not installed here: {error}", hint=f"pip install 'corral-rl[{extra}]'"
        ) from error


def emptied(folder: Path) -> Path:
    """The folder, with nothing of an earlier tracker in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    return folder


def _without_environment(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_environment(value) for key, value in config.items() if key != "env_vars"}
    return config
