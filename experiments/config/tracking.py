"""What a trial's numbers are handed to while it runs."""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator

from corral.experiments.config.base import FrozenConfig

PACKAGE_BY_TRACKER: Mapping[str, str | None] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus": None,
}
"""The trackers that ship, and the package that each needs."""


def _known(name: str) -> str:
    if name not in PACKAGE_BY_TRACKER and not re.fullmatch(r"[\w.]+:\w+", name):
        raise ValueError(f"there is no tracker {name!r}; {', '.join(PACKAGE_BY_TRACKER)}, or package.module:name")
    return name


class TrackingConfig(FrozenConfig):
    """Trackers, each run by the supervisor as a process of its own, whose end is never the trial's."""

    to: tuple[Annotated[str, AfterValidator(_known)], ...] = ()
    """Any of tensorboard, wandb, mlflow, prometheus, or import paths of trackers of your own; they follow what commits
    cover, and what was given up `rl-track` makes up for. Where they write to, and by which key, is theirs to say."""
