"""Rules of the watchers speak of trials that suffer from what they are about."""

from collections.abc import Callable, Mapping

import pytest

from corral.launcher.trial.metrics import last_lines
from corral.launcher.trial.watchers import RULES, findings_of
from tests.integration.trial_helpers import Material, Trial

UNSTEADY: Mapping[str, object] = {
    "rollout.reward": "suffering_rewards:by_chance",
    "actor.optimizer.lr": 0.01,
    "actor.optimizer.warmup_steps_proportion": 0.0,
    "actor.optimizer.lr_schedule": "constant",
    "ppo.n_minibatches": 2,
}
SUFFERING: Mapping[str, Mapping[str, object]] = {
    "no_eos_fraction": {"rollout.sampling.max_new_tokens": 1},
    "rewards_are_equal": {"rollout.reward": "suffering_rewards:nothing"},
    "data/dropped_of_issued": {
        "rollout.reward": "suffering_rewards:mostly_nothing",
        "rollout.drop_uniform_groups": True,
        "train_batch_size": 2,
    },
    "data/dropped_for_errors": {"rollout.reward": "suffering_rewards:often_failing", "rollout.reward_retries": 0},
    "ppo/clip_fraction": UNSTEADY | {"ppo.eps_clip": 0.005, "ppo.sample_reuse": 3},
    "train/skipped_early_stop": UNSTEADY | {"ppo.early_stop_imp_ratio": 1.0000001},
    "ppo/capped_fraction": UNSTEADY | {"ppo.is_ratio_clip": 1.001},
    "answers_are_alike": {"rollout.sampling.temperature": 1e-5, "rollout.reward": "suffering_rewards:nothing"},
    "ppo/ref_kl": UNSTEADY | {"ppo.kl.coef": 1e-6, "actor.optimizer.lr": 0.03},
    "length_growth": {"rollout.agent": "suffering_rewards:growing", "rollout.agent_processes": 1},
    "entropy_is_gone": UNSTEADY | {"actor.optimizer.lr": 1.0, "rollout.reward": "suffering_rewards:halved"},
}


@pytest.mark.slow
@pytest.mark.parametrize("metric", SUFFERING)
def test_a_rule_speaks_of_a_trial_that_is_made_to_suffer(
    metric: str, start_trial: Callable[..., Trial], material: Material
) -> None:
    settings: dict[str, object] = {
        "train_batch_size": 4,
        "evaluation.every": "1000 steps",
        "control.commit_every": "4 steps",
    }
    if metric == "ppo/ref_kl":
        settings["ref.path"] = material.model
    trial = start_trial(num_rows=120, overrides={**settings, **SUFFERING[metric]})
    trial.wait_for_end()
    (rule,) = (rule for rule in RULES if rule.metric == metric)
    found = findings_of(last_lines(trial.directory.metrics_path), trial="exp/t")
    assert rule.remedy.format(trial="exp/t") in [finding.details for finding in found]


def test_every_rule_has_its_trial() -> None:
    assert SUFFERING.keys() == {rule.metric for rule in RULES}
