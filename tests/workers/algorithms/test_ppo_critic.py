"""The critic: values in units of reward, a state that survives, and batches that train nothing."""

import math
from typing import Any

import numpy as np
import pytest

from corral.experiments.config.algorithm import CriticConfig, KLConfig, PPOConfig
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.ppo_critic import PPOCriticInterface
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.algorithms.small_engine import SmallEngine
from tests.workers.backends.training_helpers import make_sample


def judged(critic: PPOCriticInterface, engine: SmallEngine, *, seed: int = 0) -> SequenceSample:
    sample = make_sample([[8, 12, 9], [5, 6, 7]], seed=seed)
    sample.data["rewards"] = np.array([100.0, 90.0, 110.0, 100.0, 95.0, 105.0], np.float32)
    return sample.with_key("values", critic.inference(engine, sample)["values"])


def make_critic(**settings: Any) -> PPOCriticInterface:
    return PPOCriticInterface(PPOConfig(), CriticConfig.model_validate(settings))


@pytest.mark.parametrize("value_norm", ["exponential", "plain"])
def test_a_normalised_critic_expects_rewards_of_any_size_after_one_step(value_norm: str) -> None:
    def error_after(settings: dict[str, Any]) -> float:
        engine, critic = SmallEngine("value", lr=0.2), make_critic(**settings)
        stats = critic.train_step(engine, judged(critic, engine), version=0)
        assert stats["returns/mean"] == pytest.approx(100.0, abs=5.0)
        return float(np.abs(critic.inference(engine, judged(critic, engine))["values"] - 100.0).mean())

    assert error_after({"value_norm": value_norm}) < 10.0
    assert error_after({"value_norm": "none", "value_eps_clip": None}) > 30.0


def test_the_normaliser_goes_on_from_its_state() -> None:
    engine, critic = SmallEngine("value"), make_critic()
    critic.train_step(engine, judged(critic, engine), version=0)
    resumed = make_critic()
    resumed.load_state_dict(critic.state_dict())
    before, after = (one.inference(engine, judged(one, engine))["values"] for one in (critic, resumed))
    assert before.tolist() == after.tolist()
    assert make_critic(value_norm="none").state_dict() == {}
    with pytest.raises(ValueError, match="running moments needs"):
        make_critic().load_state_dict({})


@pytest.mark.parametrize("key", ["rewards", "values"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_number_that_is_not_finite_trains_neither_critic_nor_normaliser(key: str, value: float) -> None:
    engine, critic = SmallEngine("value"), make_critic()
    critic.train_step(engine, judged(critic, engine), version=0)
    state, sample = critic.state_dict(), judged(critic, engine, seed=1)
    sample.data[key] = np.array(sample.data[key])
    sample.data[key][0] = value
    stats = critic.train_step(engine, sample, version=1)
    assert (engine.step, stats["train/skipped_nonfinite"]) == (1, 1.0)
    assert critic.state_dict() == state


def test_a_kl_penalty_in_the_rewards_is_in_the_returns_too() -> None:
    def mean_return(kl: KLConfig) -> float:
        critic, engine = PPOCriticInterface(PPOConfig(kl=kl), CriticConfig()), SmallEngine("value")
        return critic.train_step(engine, judged(critic, engine), version=0)["returns/mean"]

    assert mean_return(KLConfig(coef=5.0, place="loss")) == mean_return(KLConfig())
    assert mean_return(KLConfig(coef=5.0, place="reward")) != mean_return(KLConfig())
    charged = PPOCriticInterface(PPOConfig(kl=KLConfig(coef=5.0, place="reward")), CriticConfig())
    assert "ref_logprobs" in {key.name for key in charged.inputs[CallType.TRAIN_STEP]}


def test_actor_and_critic_pass_over_a_batch_equally_often() -> None:
    engine = SmallEngine("value", lr=0.01)
    critic = PPOCriticInterface(PPOConfig(n_minibatches=2, sample_reuse=3), CriticConfig())
    critic.train_step(engine, judged(critic, engine), version=0)
    assert engine.step == 6
