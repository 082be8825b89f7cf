"""Settings of the algorithms that have no effect, or need another one."""

from typing import Any

import pytest

from corral.experiments.config.algorithm import KLConfig, PPOConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "grpo"}, "must be ppo, gspo, cispo or an import path"),
        ({"loss": "my pkg:loss"}, "must look like package.module:name"),
        ({"advantage": "grpo"}, "must be group_relative, rloo, rewards_to_go, gae or an import path"),
        ({"loss": "gspo", "c_clip": 3.0}, "c_clip has no effect without loss: ppo"),
        ({"loss_divisor": 64}, "loss_divisor has no effect without loss_reduction: fixed_divisor"),
        ({"loss_reduction": "fixed_divisor"}, "needs loss_divisor"),
        ({"use_decoupled_loss": False, "behav_imp_weight_mode": "truncate"}, "without use_decoupled_loss"),
        ({"behav_imp_weight_cap": None, "behav_imp_weight_mode": "truncate"}, "needs behav_imp_weight_cap"),
        ({"advantage": "rloo", "group_std_normalization": False}, "without advantage: group_relative"),
        ({"gae_lambda": 0.9}, "gae_lambda has no effect without advantage: gae"),
        ({"kl": {"coef": 0.1, "place": "reward", "estimator": "k2"}}, "estimator k2 has no effect with place: reward"),
        ({"kl": {"target": 6.0}}, "target can never be reached from coef 0"),
        ({"kl": {"coef": 0.1, "horizon": 10.0}}, "horizon has no effect without target"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig.model_validate(settings)


def test_settings_written_as_they_are_by_default_are_no_mistake() -> None:
    PPOConfig.model_validate({"loss": "cispo", "c_clip": None, "loss_divisor": None, "gae_lambda": 1.0})
    KLConfig.model_validate({"coef": 0.1, "place": "reward", "estimator": "k1"})
    PPOConfig.model_validate({"loss": "mine:loss", "advantage": "mine:advantage", "c_clip": 3.0, "gae_lambda": 0.9})
