"""Trackers, which receive a trial's numbers while it runs."""

import re
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from corral.experiments.config.base import FrozenConfig
from corral.scheduling.errors import RuleError

PACKAGE_BY_TRACKER: Mapping[str, str | None] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus": None,
    "command": None,
}
"""The trackers that ship, and the package that each needs."""


def _known(name: str) -> str:
    if name not in PACKAGE_BY_TRACKER and not re.fullmatch(r"[\w.]+:\w+", name):
        raise RuleError(f"there is no tracker {name!r}", f"{', '.join(PACKAGE_BY_TRACKER)}, or package.module:name")
    return name


class TrackingConfig(FrozenConfig):
    """Trackers, each run by the supervisor as a process of its own, whose end is never the trial's."""

    to: tuple[Annotated[str, AfterValidator(_known)], ...] = ()
    """Any of tensorboard, wandb, mlflow, prometheus, command, or import paths of trackers of your own; they follow what
    commits cover. Where they write to, and by which key, their own environment variables say."""
    command: tuple[str, ...] = ()
    """Of the tracker `command`: a program and its arguments, started whenever a rule of the watchers begins to speak,
    with that as one line of JSON on its standard input; it has a minute."""

    @model_validator(mode="after")
    def _command_is_run(self) -> Self:
        if ("command" in self.to) != bool(self.command):
            raise ValueError("the tracker `command` in `to` runs what `command` names: give both, or neither")
        return self
