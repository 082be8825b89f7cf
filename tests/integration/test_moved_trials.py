"""Whole trials that go on with other ranks, twice: every step's loss is that of a trial that nobody stopped.

Where several rollout workers take part the batches are not those of another run; then every sample is trained once.
With rollout workers a stop gives up the answers that are under way: their prompts are issued again, by other numbers
and so with other answers, and from that step on losses are those of another run, too.
"""

import json
from collections.abc import Callable, Mapping

import pytest

from corral.experiments.plan import RunPlan
from tests.integration.evidence import check_every_sample_was_consumed_once, check_nothing_is_left
from tests.integration.trial_helpers import Trial, read_lines

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
    settings = {
        "allocation": first,
        "control.commit_every_steps": 3,
        # What answers are made of depends on nothing but the step only at eta 0.
        **({"rollout.max_head_offpolicyness": 0} if recipe == "grpo" else {}),
        # Each data-parallel rank cuts its own answers into mini-batches.
        **({"ppo.n_minibatches": 1} if recipe in WITH_REWARDS else {}),
        **({"evaluation": "null"} if recipe in WITH_REWARDS else {"evaluation.every_steps": 1}),
        **workers,
    }
    num_passes = 1 if recipe in WITH_REWARDS else 6
    rows = {"num_rows": STEPS[recipe] * BATCH // num_passes, "num_passes": num_passes, "overrides": settings}
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
    moved.wait_for_end()
    check_nothing_is_left(moved)
    check_every_sample_was_consumed_once(moved)
    assert moved.train_steps() == list(range(1, STEPS[recipe] + 1))
    if workers:
        return  # who of several workers is admitted first follows from the clock, and with it what a batch consists of
    straight = start_trial(recipe, **rows)
    straight.wait_for_end()
    alike = STEPS[recipe] if recipe != "grpo" else steps_of_the_same_answers(moved, straight)
    assert alike >= 1
    for name in LOSSES[recipe]:
        assert values(moved, name)[:alike] == pytest.approx(values(straight, name)[:alike], rel=1e-4, abs=1e-6), name


def steps_of_the_same_answers(*trials: Trial) -> int:
    """How many steps from the first on have answers to the same prompts, which are issued by the same numbers."""
    issued = [
        {(line["step"], line["uid"], line["order"]) for line in read_lines(trial.directory.trajectories_path)}
        for trial in trials
    ]
    return min((step for step, _, _ in set.symmetric_difference(*issued)), default=STEPS["grpo"] + 1) - 1


def values(trial: Trial, name: str) -> list[float]:
    return [line[name] for line in trial.metrics() if "time/train_s" in line]


def rollout_workers(trial: Trial) -> list[object]:
    plan = RunPlan.from_json(trial.directory.plan_path.read_bytes())
    return [worker for worker in plan.workers if worker.kind == "rollout_worker"]
