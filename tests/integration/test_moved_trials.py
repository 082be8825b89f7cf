"""Whole trials that go on with other ranks, or lose a process of each kind: every step's loss is that of one that
nothing happened to.

With rollout workers, at eta 0: stops and deaths lose the answers that are under way, and their prompts get the same
ones again.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from corral.experiments.plan import RunPlan
from tests.integration.evidence import check_every_sample_was_consumed_once, check_nothing_is_left
from tests.integration.trial_helpers import Trial

WITH_REWARDS = ("ppo", "grpo")
STEPS = {"sft": 60, "dpo": 60, "ppo": 15, "grpo": 15}  # those without rewards cannot be slowed down
BATCH = 8
ALLOCATIONS = {
    "sft": ("fsdp:d1", "fsdp:d2", "fsdp:t2"),
    "dpo": ("actor=fsdp:d1,ref=fsdp:d1", "fsdp:d2", "actor=fsdp:d2,ref=fsdp:d1"),
    "ppo": ("fsdp:d1", "fsdp:d2", "actor,ref=fsdp:d1,critic=fsdp:d1"),
    "grpo": ("hf:d1+fsdp:d1", "hf:d2+fsdp:d2", "hf:d1+fsdp:d1"),
}
LOSSES = {
    "sft": ("sft/loss",),
    "dpo": ("dpo/loss",),
    "ppo": ("ppo/loss", "critic/loss", "rewards/mean"),
    "grpo": ("ppo/loss", "rewards/mean"),
}
ELASTIC = {"groups.rollout_worker.count": 2, "groups.rollout_worker.elastic": "{count: 1}"}


@pytest.mark.slow  # test_resume_on_other_meshes.py and test_reallocate.py have the parts of it that are quick
@pytest.mark.parametrize(
    ("recipe", "workers"),
    [
        ("sft", {}),
        ("dpo", {}),
        ("ppo", {}),
        ("grpo", {}),
        pytest.param("grpo", ELASTIC, id="grpo-elastic"),
    ],
)
def test_a_trial_that_is_moved_twice_trains_as_one_that_was_never_stopped(
    start_trial: Callable[..., Trial], recipe: str, workers: Mapping[str, object]
) -> None:
    first, *later = ALLOCATIONS[recipe]
    rows = rows_and_settings(recipe, {"allocation": first, **workers})
    moved = start_trial(recipe, **rows, pause_s=0.02 if recipe in WITH_REWARDS else 0.0)
    before = rollout_workers(moved)
    for allocation in later:
        moved.wait_for_steps(1)
        assert "STOPPED" in moved.run("rl-stop")
        moved.run_resume("-s", f"allocation={allocation}")
        assert json.loads(moved.directory.plan_path.read_bytes())["config"]["allocation"] == allocation
        assert rollout_workers(moved) == before
    if recipe in WITH_REWARDS:
        moved.full_speed()
    check_it_ends_as(moved, start_trial(recipe, **rows), recipe)


@pytest.mark.slow
def test_a_trial_whose_processes_are_killed_trains_as_one_that_nothing_happened_to(
    start_trial: Callable[..., Trial],
) -> None:
    # With a window prompts are trained on in their order, and mini-batches follow from it.
    settings = {"allocation": "hf:d1+fsdp:d1", "ppo.n_minibatches": 2, "rollout.reorder_window": 1}
    rows = rows_and_settings("grpo", settings, num_steps=30)
    killed = start_trial("grpo", **rows, pause_s=0.05)
    killed.wait_for_steps(1)
    for victim in ("rollout_worker/0", "generation_server/0", "gserver_manager/0", "model_worker/0", "supervisor"):
        killed.wait_for_uncommitted_step(commit_every_steps=3)
        killed.kill(victim)
        killed.wait_for_steps(1)
    killed.full_speed()
    check_it_ends_as(killed, start_trial("grpo", **rows), "grpo")


def rows_and_settings(recipe: str, settings: Mapping[str, object], num_steps: int | None = None) -> dict[str, Any]:
    settings = {
        "control.commit_every": "3 steps",
        # What answers are made of depends on nothing but the step only at eta 0.
        **({"rollout.max_head_offpolicyness": 0} if recipe == "grpo" else {}),
        # Each data-parallel rank cuts its own answers into mini-batches.
        **({"ppo.n_minibatches": 1} if recipe in WITH_REWARDS else {}),
        **({"evaluation": "null"} if recipe in WITH_REWARDS else {"evaluation.every": "1 step"}),
        **settings,
    }
    num_passes = 1 if recipe in WITH_REWARDS else 6
    num_rows = (num_steps or STEPS[recipe]) * BATCH // num_passes
    return {"num_rows": num_rows, "num_passes": num_passes, "overrides": settings}


def check_it_ends_as(trial: Trial, straight: Trial, recipe: str) -> None:
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    straight.wait_for_end()
    assert trial.train_steps() == straight.train_steps() == list(range(1, len(straight.train_steps()) + 1))
    for name in LOSSES[recipe]:
        assert values(trial, name) == pytest.approx(values(straight, name), rel=1e-4, abs=1e-6), name


def values(trial: Trial, name: str) -> list[float]:
    return [line[name] for line in trial.metrics() if "time/train_s" in line]


def rollout_workers(trial: Trial) -> list[object]:
    plan = RunPlan.from_json(trial.directory.plan_path.read_bytes())
    return [worker for worker in plan.workers if worker.kind == "rollout_worker"]
