"""The trackers that ship, by name, and those of users, by import path."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from corral.experiments.errors import ConfigError
from corral.launcher.tracking.mlflow_run import MLflowRun
from corral.launcher.tracking.news import NewsCommand
from corral.launcher.tracking.prometheus import PrometheusFile
from corral.launcher.tracking.tensorboard import TensorBoard
from corral.launcher.tracking.tracker import MakeTracker
from corral.launcher.tracking.wandb_run import WandbRun

TRACKERS: Mapping[str, MakeTracker] = {
    "tensorboard": TensorBoard,
    "wandb": WandbRun,
    "mlflow": MLflowRun,
    "prometheus": PrometheusFile,
    "command": NewsCommand,
}


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
