"""A trial goes on with other ranks: what a resume may change of a plan, and what must be as it was.

config.yaml, as the user wrote it --still gives--> the settings of plan.json
            + another allocation  --is planned----> RunPlan of the same trial

A checkpoint is that of the whole model, and samples belong to rollout workers, whose number therefore stays. All else
that follows from the allocation follows from the new one, which is why config.yaml holds nothing that was filled in.
"""

from collections.abc import Mapping
from typing import Any, Final

from corral.experiments.errors import ConfigError, located
from corral.experiments.plan import RunPlan, make_run_plan
from corral.experiments.registry import load_with_source
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.submit.environments import kept_rows

_FOLLOWING: Final = ("model_worker", "generation_server")
"""Groups whose count the allocation says; one that was written beside it said the same once."""


def reallocated(plan: RunPlan, directory: TrialDirectory, allocation: str) -> tuple[RunPlan, Mapping[str, Any]]:
    """The trial's plan with another allocation, and what config.yaml is to say then.

    What is in the spool of a rollout worker that there is no longer is generated again.

    Args:
        allocation: as the experiment file would have it.

    Raises:
        ConfigError: if it does not fit the experiment, or the trial's files are not what it was planned from.
    """
    kept = kept_rows(directory)
    before = load_with_source(directory.config_path, [f"allocation={plan.config['allocation']}", *kept])
    if differing := _changed_keys(plan.config, before.experiment.placed_in(directory.path).model_dump(mode="json")):
        raise ConfigError.of(
            f"{directory.config_path} is not what the trial was planned from: {', '.join(differing[:3])} differs",
            hint="put the file back; a trial goes on with other ranks, and with no other settings",
        )
    follow = [f"groups.{kind}.count=null" for kind in _FOLLOWING if kind in before.written.get("groups", {})]
    loaded = load_with_source(directory.config_path, [f"allocation={allocation}", *follow, *kept])
    with located(loaded.source):
        changed = make_run_plan(loaded.experiment, plan.trial, plan.mode)
    return changed, loaded.written


def _changed_keys(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
