"""Settings of the algorithms that have no effect, or need another one."""

from pathlib import Path
from typing import Any

import pytest

from corral.experiments.config.algorithm import DPOConfig, KLConfig, PPOConfig
from corral.experiments.config.presets import PRESETS
from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.registry import load_experiment
from tests.experiments.broken_yaml import VALID_PPO, write_inputs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "grpo"}, "must be ppo, gspo, cispo or an import path"),
        ({"loss": "my pkg:loss"}, "must look like package.module:name"),
        ({"advantage": "grpo"}, "must be group_relative, rloo, opo, rewards_to_go, gae, none or an import path"),
        ({"loss": "gspo", "c_clip": 3.0}, "c_clip has no effect without loss: ppo"),
        ({"loss_divisor": 64}, "loss_divisor has no effect without loss_reduction: fixed_divisor"),
        ({"loss_reduction": "fixed_divisor"}, "needs loss_divisor"),
        ({"use_decoupled_loss": False, "is_ratio_mode": "token_truncate"}, "without use_decoupled_loss"),
        ({"is_ratio_clip": None, "is_ratio_mode": "sequence_truncate"}, "sequence_truncate needs is_ratio_clip"),
        ({"advantage": "rloo", "group_std_normalization": False}, "without advantage: group_relative"),
        ({"algorithm": "sapo"}, "must be one of ppo, decoupled_ppo, grpo, .*; got 'sapo'"),
        ({"loss_settings": {"worse": 0.3}}, "loss_settings has no effect without a loss of your own"),
        ({"overlong_limit": 9}, "overlong_limit has no effect without overlong_buffer"),
        ({"overlong_limit": 9, "overlong_buffer": 10}, "10 is more than overlong_limit 9"),
        (
            {"algorithm": "tis", "use_decoupled_loss": False},
            "without use_decoupled_loss; algorithm: tis sets it: choose",
        ),
        ({"gae_lambda": 0.9}, "gae_lambda has no effect without advantage: gae"),
        ({"kl": {"coef": 0.1, "place": "reward", "estimator": "k2"}}, "estimator k2 has no effect with place: reward"),
        ({"distillation": {"divergence": "forward_kl"}}, "forward_kl needs top_k"),
        ({"kl": {"target": 6.0}}, "target can never be reached from coef 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig.model_validate(settings)


def test_settings_written_as_they_are_by_default_are_no_mistake() -> None:
    PPOConfig.model_validate({"loss": "cispo", "c_clip": None, "loss_divisor": None, "gae_lambda": 1.0})
    KLConfig.model_validate({"coef": 0.1, "place": "reward", "estimator": "k1"})
    PPOConfig.model_validate({"loss": "mine:loss", "advantage": "mine:advantage", "c_clip": 3.0, "gae_lambda": 0.9})


def test_an_algorithm_sets_what_the_file_leaves_open() -> None:
    cispo = PPOConfig.model_validate({"algorithm": "cispo", "eps_clip_high": 2.0})
    assert (cispo.loss, cispo.eps_clip, cispo.eps_clip_high, cispo.use_decoupled_loss) == ("cispo", 1.0, 2.0, False)
    both = PPOConfig.model_validate({"algorithm": "distillation", "advantage": "rloo", "distillation": {"coef": 0.1}})
    assert (both.advantage, both.distillation.coef) == ("rloo", 0.1)
    kl = PPOConfig.model_validate({"algorithm": "reinforce_plus_plus", "kl": {"coef": 0.1}}).kl
    assert (kl.coef, kl.place) == (0.1, "reward")
    again = PPOConfig.model_validate_json(cispo.model_dump_json(), strict=True)
    assert again == cispo


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_is_an_experiment_that_can_be_submitted(name: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "experiment.yaml").write_text(VALID_PPO)
    settings = [f"ppo.algorithm={name}", "rollout.sampling.max_new_tokens=20"]
    if PRESETS[name].get("advantage") == "gae":
        settings.append(f"critic={{path: {tmp_path / 'model'}}}")
    if "distillation" in PRESETS[name]:
        settings.append(f"teacher.path={tmp_path / 'model'}")
    loaded: Any = load_experiment(tmp_path / "experiment.yaml", settings)
    written = loaded.model_dump()["ppo"]
    assert written["loss_divisor"] == (20 if written["loss_reduction"] == "fixed_divisor" else None)
    assert [written["overlong_buffer"], written["overlong_limit"]] == ([4, 20] if name == "dapo" else [None, None])
    assert loaded.rollout.drop_uniform_groups == (name == "dapo")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smoothing": 0.1, "loss": "ipo"}, "label_smoothing has no effect with loss: ipo"),
        ({"target_margin": 0.1}, "target_margin has no effect with loss: dpo"),
    ],
)
def test_settings_of_other_losses_of_pairs_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPOConfig.model_validate(settings)


def test_sampling_that_the_trainer_does_not_know_of_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="repetition_penalty would change the generator's logits .* in the reward"):
        SamplingConfig.model_validate({"repetition_penalty": 1.1})
