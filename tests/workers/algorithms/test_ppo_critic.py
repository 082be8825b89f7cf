"""The critic: values in units of reward, a state that survives, and batches that train nothing."""

import copy
import math
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from corral.experiments.config.algorithm import CriticConfig, KLConfig, PPOConfig
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.base import compute_logprobs, response_mask
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.algorithms.ppo_critic import PPOCriticInterface
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
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


# --- a whole step of actor and critic -------------------------------------------------------------------------------

LENGTHS = [[5, 9, 4], [12, 6, 7]]
LR = 0.2


class PlainLoop:
    """PPO as a textbook says it, over lists of numbers; only the models' forward passes are shared."""

    def __init__(self, config: PPOConfig, critic: CriticConfig, actor: SmallEngine, values: SmallEngine) -> None:
        self.config, self.critic_config = config, critic
        self.actor, self.critic = copy.deepcopy(actor), copy.deepcopy(values)
        self.seen: list[list[float]] = []
        """Returns of every step so far: what the plain normaliser averages."""

    def moments(self) -> tuple[float, float]:
        flat = [x for step in self.seen for x in step]
        if self.critic_config.value_norm == "none" or not flat:
            return 0.0, 1.0
        mean = fmean(flat)
        return mean, math.sqrt(max(fmean(x * x for x in flat) - mean**2, 1e-2))

    def values(self, sample: SequenceSample) -> list[list[float]]:
        mean, std = self.moments()
        with torch.no_grad():
            return [[float(v) * std + mean for v in self.critic.states(ids)[:, 0]] for ids in tokens(sample)]

    def step(self, sample: SequenceSample, values: list[list[float]]) -> None:
        config = self.config
        old, ref = per_answer(sample, "old_logprobs"), per_answer(sample, "ref_logprobs")
        rewards, truncated = sample.data["rewards"], sample.data["seq_no_eos_mask"]
        responses = [[i for i, is_response in enumerate(mask) if is_response] for mask in masks(sample)]
        advantages: list[dict[int, float]] = []
        for n, positions in enumerate(responses):
            shaped = float(rewards[n])
            running, of_answer = 0.0, dict[int, float]()
            for t in reversed(positions):
                is_last = t == positions[-1]
                reward = -config.kl.coef * (old[n][t] - ref[n][t]) + (shaped if is_last else 0.0)
                following = 0.0 if is_last and not truncated[n] else values[n][t + 1]
                delta = reward + config.discount * following - values[n][t]
                running = delta + config.discount * config.gae_lambda * running
                of_answer[t] = running
            advantages.append(of_answer)
        returns = [{t: a + values[n][t] for t, a in of.items()} for n, of in enumerate(advantages)]
        self.train_actor(sample, normalised(advantages), old)
        self.train_critic(sample, values, returns)

    def train_actor(self, sample: SequenceSample, advantages: list[dict[int, float]], old: list[list[float]]) -> None:
        losses = []
        for n, ids in enumerate(tokens(sample)):
            logprobs = torch.log_softmax(self.actor.states(ids), dim=-1)
            for t, advantage in advantages[n].items():
                ratio = torch.exp(logprobs[t, ids[t + 1]] - old[n][t])
                clipped = ratio.clamp(1 - self.config.eps_clip, 1 + self.config.eps_clip)
                losses.append(torch.maximum(-advantage * ratio, -advantage * clipped))
        descend(self.actor, torch.stack(losses).mean())

    def train_critic(self, sample: SequenceSample, values: list[list[float]], returns: list[dict[int, float]]) -> None:
        old_mean, old_std = self.moments()
        self.seen.append([x for of in returns for x in of.values()])
        mean, std = self.moments()
        clip, losses = self.critic_config.value_eps_clip or math.inf, []
        for n, ids in enumerate(tokens(sample)):
            predicted = self.critic.states(ids)[:, 0]
            for t, target in returns[n].items():
                wanted, old = (target - mean) / std, (values[n][t] - old_mean) / old_std
                near = old + (predicted[t] - old).clamp(-clip, clip)
                losses.append(0.5 * torch.maximum((predicted[t] - wanted) ** 2, (near - wanted) ** 2))
        descend(self.critic, torch.stack(losses).mean())


def descend(engine: SmallEngine, loss: torch.Tensor) -> None:
    parameters = list(engine.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.data -= LR * gradient


def normalised(advantages: list[dict[int, float]]) -> list[dict[int, float]]:
    flat = [a for of in advantages for a in of.values()]
    mean = fmean(flat)
    std = math.sqrt(fmean((a - mean) ** 2 for a in flat))
    return [{t: (a - mean) / (std + 1e-5) for t, a in of.items()} for of in advantages]


def tokens(sample: SequenceSample) -> list[torch.Tensor]:
    ids = np.asarray(sample.data["input_ids"], np.int64)
    return [torch.from_numpy(ids[place]) for place in answer_slices(sample.answer_lengths())]


def per_answer(sample: SequenceSample, key: str) -> list[list[float]]:
    return [sample.data[key][place].tolist() for place in answer_slices(sample.answer_lengths(key))]


def masks(sample: SequenceSample) -> list[list[bool]]:
    places = answer_slices([length - 1 for length in sample.answer_lengths()])
    return [response_mask(sample)[place].tolist() for place in places]


@pytest.mark.parametrize("value_norm", ["none", "plain"])
def test_actor_and_critic_train_as_a_plain_loop_does(value_norm: Any) -> None:
    config = PPOConfig.model_validate(
        {
            "use_decoupled_loss": False,
            "advantage": "gae",
            "advantage_normalization": "batch",
            "discount": 0.9,
            "gae_lambda": 0.8,
            "kl": {"coef": 0.2, "place": "reward"},
        }
    )
    critic_config = CriticConfig(value_norm=value_norm)
    actor_engine, critic_engine = SmallEngine("lm", lr=LR), SmallEngine("value", lr=LR)
    actor, critic = PPOActorInterface(config), PPOCriticInterface(config, critic_config)
    loop = PlainLoop(config, critic_config, actor_engine, critic_engine)
    for step in range(4):
        sample = make_sample(LENGTHS, seed=step)
        sample = sample.with_key("old_logprobs", compute_logprobs(actor_engine, sample))
        values = loop.values(sample)
        sample = sample.with_key("values", critic.inference(critic_engine, sample)["values"])
        np.testing.assert_allclose(sample.data["values"], [v for of in values for v in of], atol=1e-4)
        loop.step(sample, values)
        actor.train_step(actor_engine, sample, version=step)
        critic.train_step(critic_engine, sample, version=step)
    for engine, reference in ((actor_engine, loop.actor), (critic_engine, loop.critic)):
        expected = reference.model.state_dict()
        for name, tensor in engine.model.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=0.0)
