"""A trial of everything that docs/customize.md adds: graph, reward, interface, advantage and loss of the user's own."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.experiments.plan import RunPlan
from tests.integration.evidence import check_every_sample_was_consumed_once, check_nothing_is_left
from tests.integration.test_stop_and_resume import check_stopped, last_committed_step
from tests.integration.trial_helpers import RECIPES, Material, Trial
from tests.misleading import write_misleading_modules
from tests.test_customize import DOCUMENT, FILES


def customized(folder: Path) -> Path:
    """The recipe of synchronous PPO without its critic, and with every YAML line of the document.

    Of the two losses that go by themselves it is the one that says how it fares.
    """
    recipe: dict[str, Any] = yaml.safe_load((RECIPES / "arithmetic_ppo.yaml").read_text())
    del recipe["critic"]
    for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        if "loss_settings" in block or "my_rows" in block:  # the latter are of a trial on SLURM
            continue
        for key, value in yaml.safe_load(block).items():
            recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    (folder / "customized.yaml").write_text(yaml.safe_dump(recipe))
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    return folder / "customized.yaml"


def test_everything_of_ones_own_takes_part_in_a_trial(
    start_trial: Callable[..., Trial], material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    write_misleading_modules(folder)  # of these none takes part
    file = customized(folder)
    monkeypatch.chdir(folder)  # where a user's files lie, and rl-submit is started
    trial = start_trial(
        "grpo",  # whose paths are those that the file has, too
        num_rows=48,
        pause_s=0.02,
        file=file,
        overrides={
            "ref.path": material.model,
            "reward_model.path": material.model,
            "rollout.sampling.stop": json.dumps(list("0123456789")),
            "control.commit_every": "3 steps",
        },
    )
    trial.wait_for_steps(1)
    assert "STOPPED" in trial.run("rl-stop")
    check_stopped(trial, by_epoch=1)
    # The step that was under way has ended, and everything that was trained is committed.
    assert last_committed_step(trial) == trial.train_steps()[-1] > 0
    folder.rename(tmp_path / "moved_away")  # the trial keeps what it was submitted with, and goes on from anywhere
    monkeypatch.chdir("/")
    trial.full_speed()
    trial.run_resume()
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    plan = RunPlan.from_json(trial.directory.plan_path.read_bytes())
    calls = {call.name: call for call in plan.master.calls}
    assert calls.keys() == {"actor_gen", "ref_inf", "rew_inf", "surprise_inf", "actor_train", "evaluate"}
    assert {key.name for key in plan.master.declared_keys} == {"fluency", "model_rewards", "surprise"}
    assert "surprise" in calls["actor_train"].input_keys and "fluency" not in calls["actor_train"].input_keys
    steps = [line for line in trial.metrics() if "ppo/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 7))
    for line in steps:
        assert 0.0 < line["gentle/worse_fraction"] < 1.0
        assert line["rewards/mean"] < 0.0  # a share of digits is not, a log-probability is
        assert line["response_length/mean"] < 3.0  # most characters are digits, and end an answer
