"""Trackers: what a trial's numbers are handed to, line by line.

A tracker begins anew with every start of rl-track, and is given all lines from the first on. So whatever ended it
before, each line is there once: nothing has to be remembered, and nothing can be told twice.
"""

import shutil
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from corral.experiments.errors import ConfigError


class Tracker(Protocol):
    """One of the user's own is a class or function of this form, named by its import path."""

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Numbers of a train step, or of an evaluation of the policy after it, by their names.

        Args:
            time_s: when they were written, in seconds since 1970.
        """

    def flush(self) -> None:
        """What was added is to be seen."""

    def close(self) -> None:
        """Nothing more will come."""


MakeTracker = Callable[[Path, str], Tracker]
"""From the folder that it may write into, and the trial's name."""


class TensorBoard:
    """Event files: `tensorboard --logdir TRIAL_DIRECTORY/tracking`."""

    def __init__(self, folder: Path, trial: str) -> None:
        """
        Raises:
            ConfigError: if the package is not there.
        """
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            hint = "pip install 'corral-rl[tensorboard]'"
            raise ConfigError.of(f"tensorboard is not installed here: {error}", hint=hint) from error
        shutil.rmtree(folder, ignore_errors=True)
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._writer.add_event(self._event(wall_time=time_s, step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


TRACKERS: Mapping[str, MakeTracker] = {"tensorboard": TensorBoard}


def tracker_named(name: str) -> MakeTracker:
    """One of `TRACKERS`, or that of an import path.

    Raises:
        ConfigError: if there is none.
    """
    if name in TRACKERS:
        return TRACKERS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError.of(f"there is no tracker {name!r}", hint=f"{', '.join(TRACKERS)}, or package.module:name")
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError.of(f"{name} cannot be imported: {error}", hint="it is looked for as Python does") from error
    made: MakeTracker = found
    return made
