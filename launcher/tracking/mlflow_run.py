"""MLflow: one run in the store that $MLFLOW_TRACKING_URI names, or in a SQLite file of the folder.

`mlflow ui --backend-store-uri sqlite:///TRIAL_DIRECTORY/tracking/mlflow/mlflow.db`

Guarantee: runs that carry the trial's id are deleted before another one begins. So each line is there once in the one
that is left. MLflow chooses the ids of runs: the trial's is a tag.
"""

import os
import re
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

from corral.launcher.tracking.tracker import TrackedTrial, emptied, package

_TAG = "corral_trial"
_MOST = 1000  # metrics in a request
_LONGEST_NAME = 240  # of 250 characters; what tells two apart follows


def mlflow_name(key: str) -> str:
    """The key of a metric in the letters that MLflow takes, which refuses a whole request for one other.

    Example:
        mlflow_name("eval/pass@4") == "eval/pass_at_4"
    """
    plain = re.sub(r"[^A-Za-z0-9_\-. /]", "_", key.replace("@", "_at_"))
    parts = [part for part in plain.split("/") if part.strip(".")]  # no path out of a folder, and none with gaps
    return "/".join(parts)[:_LONGEST_NAME] or "_"


class MLflowRun:
    """Server, key and name of the experiment are those of MLflow's own environment variables."""

    def __init__(self, folder: Path, trial: TrackedTrial) -> None:
        """
        Raises:
            ConfigError: if the package is not there.
        """
        emptied(folder)
        self._metric = package("mlflow.entities", "mlflow").Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        client = package("mlflow.tracking", "mlflow").MlflowClient(uri or f"sqlite:///{folder}/mlflow.db")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or trial.experiment
        if (experiment := client.get_experiment_by_name(name)) is not None:
            number = experiment.experiment_id
        else:
            number = client.create_experiment(name, None if uri else str(folder / "artifacts"))
        while found := client.search_runs([number], f"tags.{_TAG} = '{trial.uuid}'"):
            for run in found:
                client.delete_run(run.info.run_id)
        self._client = client
        self._run = client.create_run(number, run_name=trial.trial, tags={_TAG: trial.uuid}).info.run_id
        self._waiting: list[Any] = []
        self._name_by_key: dict[str, str] = {}

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._waiting += [
            self._metric(self._name(key), value, int(1000 * time_s), step) for key, value in values.items()
        ]
        if len(self._waiting) >= _MOST:
            self.flush()

    def _name(self, key: str) -> str:
        """What a metric is called here, where it is told apart from all others."""
        if key not in self._name_by_key:
            name, taken = mlflow_name(key), set(self._name_by_key.values())
            numbered = (f"{name}_{number}" for number in count(2))
            self._name_by_key[key] = next(one for one in chain([name], numbered) if one not in taken)
        return self._name_by_key[key]

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for at in range(0, len(waiting), _MOST):
            self._client.log_batch(self._run, metrics=waiting[at : at + _MOST])

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self._run)
