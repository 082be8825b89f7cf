"""Generation as a call of the graph: the same machine, one thing after the other.

The asynchronous trial that it is compared with is the one that is watched from rl-submit to its report.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.experiments.exit_codes import CommandExit
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.test_local_trial import (
    NUM_STEPS,
    WATCHED,
    check_watched_to_its_end,
    watched_settings,
)
from tests.integration.trial_helpers import RECIPES, Material, Trial, submit


def alike(material: Material) -> dict[str, object]:
    """Few steps, that learn from rewards and from the model that they begin with, which reads the answer instead."""
    return {
        "actor.optimizer.lr": 1e-3,
        "ppo.n_minibatches": 2,
        "teacher.path": material.model,
        "ppo.distillation.coef": 1.0,
        "dataset.columns.teacher_prompt": "answer",
        "dataset.columns.temperature": "warmth",
    }


def synchronous(folder: Path) -> Path:
    """The recipe of asynchronous GRPO with generation in the graph."""
    recipe: dict[str, Any] = yaml.safe_load((RECIPES / "arithmetic_grpo.yaml").read_text())
    recipe |= {"experiment": "ppo", "allocation": "fsdp:d1"}
    recipe["rollout"] = {key: recipe["rollout"][key] for key in ("sampling", "reward")}
    recipe["groups"] = {kind: recipe["groups"][kind] for kind in ("master_worker", "model_worker")}
    file = folder / "synchronous.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def answers(trial: Trial) -> list[tuple[float, ...]]:
    """What the answers of each step were like."""
    names = ("rewards/mean", "rewards/std", "response_length/mean", "no_eos_fraction", "train/tokens")
    return [tuple(line[name] for name in names) for line in trial.metrics() if "ppo/loss" in line]


def losses(trial: Trial) -> list[tuple[float, float]]:
    return [(line["ppo/loss"], line["train/grad_norm"]) for line in trial.metrics() if "ppo/loss" in line]


def check_same_training(first: Trial, second: Trial) -> None:
    """The same answers, and the same updates.

    Not bit for bit: which requests a server decodes together follows from when they come, and with it the last bits of
    their log-probabilities. That is all that differs, and what the losses inherit.
    """
    assert len(losses(first)) == NUM_STEPS
    assert answers(first) == answers(second)
    for mine, theirs in zip(losses(first), losses(second), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert len(set(losses(first))) == NUM_STEPS


@pytest.fixture(scope="module")
def in_turns(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """A synchronous trial that has ended."""
    folder = tmp_path_factory.mktemp("in_turns")
    alarmed = alike(material) | {"ppo.gap_alarm": 1e-9, "evaluation": "null"}  # by rounding alone
    rows = WATCHED["num_rows"]
    trial = submit("grpo", folder, material, num_rows=rows, overrides=alarmed, file=synchronous(folder))
    try:
        trial.wait_for_end()
        yield trial
    finally:
        trial.close()


def test_synchronous_ppo_and_asynchronous_ppo_at_eta_0_are_the_same_training(
    start_trial: Callable[..., Trial], in_turns: Trial, material: Material, tmp_path: Path
) -> None:
    at_once = watched_settings(material) | alike(material) | {"rollout.max_head_offpolicyness": 0}
    asynchronous = start_trial("grpo", **WATCHED, overrides=at_once)
    check_watched_to_its_end(asynchronous, material, tmp_path, eta=0, shares_prompts=True)
    for trial in (asynchronous, in_turns):
        check_nothing_is_left(trial)
        check_every_sample_was_consumed_once(trial)
        check_no_token_was_too_old(trial, eta=0)
        for line in (line for line in trial.metrics() if "ppo/loss" in line):
            assert line["reward/part/digits"] == pytest.approx(line["rewards/mean"], abs=1e-6)
            assert 0.0 < line["reward/seconds"] <= line["reward/seconds/max"]
    check_same_training(in_turns, asynchronous)
    assert "generator and trainer differ by " in in_turns.run("rl-status", "--check", exit_code=CommandExit.SUFFERS)
    shown = in_turns.run("rl-status")
    assert (
        in_turns.status()["state"] == "COMPLETE"
        and "\nALARM      logprob check: generator and trainer differ by " in shown
    )
    assert "\n           - arithmetic: the differences are small and follow no pattern, as rounding does" in shown


@pytest.mark.slow  # a replica beside its policy is in the other test, and meshes apart in test_four_roles.py
def test_a_replica_on_ranks_of_its_own_generates_what_the_policy_would(
    start_trial: Callable[..., Trial], in_turns: Trial, material: Material, tmp_path: Path
) -> None:
    apart = start_trial(
        "grpo",
        num_rows=WATCHED["num_rows"],
        overrides=alike(material) | {"evaluation": "null", "allocation": "actor,teacher=fsdp:d1,generation=fsdp:d1"},
        file=synchronous(tmp_path),
    )
    apart.wait_for_end()
    check_same_training(apart, in_turns)
