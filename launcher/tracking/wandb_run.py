"""Weights & Biases: one run, named by the trial's id, on the server or, where there is no way there, in the folder.

no key, or no network ──► offline: a .wandb file, which `wandb sync` uploads        else ──► online

A line is a row of the run's history. Its train step is the number `step`, since rows of Weights & Biases have to come
in order, and evaluations come after the lines of later steps.

Guarantee: a run that is started under the id of another one, and does not resume it, takes its place. So each line is
there once. Offline the folder begins empty.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.launcher.tracking.tracker import TrackedTrial, emptied, package

_INIT_TIMEOUT_S = 30.0


class WandbRun:
    """Key, server, project, entity and mode are those of wandb's own environment variables and files."""

    def __init__(self, folder: Path, trial: TrackedTrial) -> None:
        """
        Raises:
            ConfigError: if the package is not there.
        """
        self._wandb = package("wandb", "wandb")
        emptied(folder)
        chosen = os.environ.get("WANDB_MODE")
        try:
            self._run = self._begin(folder, trial, chosen or "online")
        except self._wandb.errors.Error as error:
            if chosen:
                raise
            print(f"goes on offline, `wandb sync {folder}/wandb/offline-run-*` uploads it: {error}", flush=True)
            self._wandb.teardown()  # the id is in use otherwise
            self._run = self._begin(folder, trial, "offline")
        self._run.define_metric("*", step_metric="step")

    def _begin(self, folder: Path, trial: TrackedTrial, mode: str) -> Any:
        # Of this process itself, which only reads, nothing is to be told.
        quiet = {"silent": True, "console": "off", "disable_git": True, "disable_code": True, "x_disable_meta": True}
        return self._wandb.init(
            id=trial.uuid,
            project=os.environ.get("WANDB_PROJECT") or trial.experiment,
            name=trial.trial,
            config=dict(trial.config),
            dir=folder,
            mode=mode,
            settings=self._wandb.Settings(init_timeout=_INIT_TIMEOUT_S, x_disable_stats=True, **quiet),
        )

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step, "_timestamp": time_s})

    def flush(self) -> None:
        """Its own process sends what it has as soon as it can."""

    def close(self) -> None:
        self._run.finish()
