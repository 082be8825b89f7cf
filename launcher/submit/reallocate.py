"""A trial goes on with other ranks: what a resume may change of a plan, and what must be as it was.

plan.json, config.yaml, another allocation ──► the same experiment, checked anew ──► RunPlan of the same trial

A checkpoint is that of the whole model, and samples belong to rollout workers, whose number therefore stays.
"""

from collections.abc import Iterator
from typing import Any, Final

from corral.experiments.errors import ConfigError, located
from corral.experiments.plan import RunPlan, make_run_plan
from corral.experiments.registry import load_with_source
from corral.experiments.trial.directory import TrialDirectory

_ROLLOUT: Final = "rollout_worker"


def reallocated(plan: RunPlan, directory: TrialDirectory, allocation: str) -> RunPlan:
    """The trial's plan with another allocation.

    Guarantee: every prompt stays with the rollout worker that has it in its spool, so none is lost or trained twice.

    Args:
        allocation: as the experiment file would have it.

    Raises:
        ConfigError: if it does not fit the experiment, or the trial's files are not what it was planned from.
    """
    changes = [f"allocation={allocation}"]
    if num_rollout_workers := sum(worker.kind == _ROLLOUT for worker in plan.workers):
        changes.append(f"groups.{_ROLLOUT}.count={num_rollout_workers}")
    loaded = load_with_source(directory.config_path, changes)
    with located(loaded.source):
        changed = make_run_plan(loaded.experiment, plan.trial, plan.mode)
    if differing := sorted(_changed_keys(plan.config, changed.config)):
        raise ConfigError.of(
            f"{directory.config_path} is not what the trial was planned from: {', '.join(differing[:3])} differs",
            hint="put the file back; a trial goes on with other ranks, and with no other settings",
        )
    if (before := set(_digests(plan.model_dump(mode="json")))) != set(_digests(changed.model_dump(mode="json"))):
        raise ConfigError.of(
            f"a data set of trial {plan.trial.experiment}/{plan.trial.trial} has changed since it was submitted "
            f"(SHA-256 was {', '.join(sorted(before))})",
            hint="put the file back, or submit a new trial",
        )
    return changed


def _changed_keys(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Keys whose values differ, but for those that a reallocation changes itself."""
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} - {"allocation"}
    if "groups" in changed and _without_count(before["groups"]) == _without_count(after["groups"]):
        changed.remove("groups")
    return changed


def _without_count(groups: dict[str, Any]) -> dict[str, Any]:
    return {**groups, _ROLLOUT: {**groups.get(_ROLLOUT, {}), "count": None}}


def _digests(content: Any) -> Iterator[str]:
    """Of all files that a plan names by what is in them."""
    if isinstance(content, dict):
        if isinstance(digest := content.get("sha256"), str):
            yield digest
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from _digests(value)
