"""PPO with four roles as a loop over answers, on plain transformers models: what docs/algorithms.md says, and no more.

    before any update   actor, ref ──► logprobs     critic ──► values     reward model ──► scores
                        scores, KL, values ──► token rewards ──► GAE, backwards ──► advantages, returns
    passes over it      an answer at a time ──► losses ──► clipped gradients ──► AdamW, of actor and critic
    afterwards          a share of the actor ──► ref        the batch ──► KL coefficient, value normaliser

Nothing is packed, cut into micro-batches or dealt over ranks; nothing of the code under test is used but its settings.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.config.model import OptimizerConfig
from corral.workers.algorithms import ppo_batch, ppo_critic
from tests.integration.four_roles import Answer, Group


@dataclass(kw_only=True)
class Judged:
    """An answer and what the roles said of it before the update; one entry per response token."""

    answer: Answer
    proximal: Tensor
    ref: Tensor
    values: list[float]
    """In units of reward; one more, after the last token."""
    score: float
    advantages: list[float]
    returns: list[float]


class PPOLoop:
    """The state of a run.

    Example:
        loop = PPOLoop(experiment)
        for batch in batches:
            print(loop.step(batch))
        loop.weights("critic")
    """

    def __init__(self, experiment: AsyncPPOExperiment) -> None:
        assert experiment.critic and experiment.ref and experiment.reward_model
        self._ppo, self._value = experiment.ppo, experiment.critic.values
        self._seed, self._ema = experiment.seed, experiment.ref.ema
        self._actor: Any = _load(AutoModelForCausalLM, experiment.actor.path)
        self._ref: Any = _load(AutoModelForCausalLM, experiment.ref.path)
        self._critic: Any = _load(AutoModelForTokenClassification, experiment.critic.path)
        self._reward: Any = _load(AutoModelForSequenceClassification, experiment.reward_model.path)
        self._optimizers = [
            _Optimizer(self._actor, experiment.actor.optimizer),
            _Optimizer(self._critic, experiment.critic.optimizer),
        ]
        self.kl_coefficient = experiment.ppo.kl.coef
        self.moments = [0.0, 0.0, 0.0]
        """Running sums of returns, of their squares, and the weight that both have."""
        self._num_steps = 0

    def step(self, batch: Sequence[Group]) -> tuple[float, float]:
        """One train step; the mean losses of actor and critic over its optimizer steps."""
        judged = [self._judge(answer) for group in batch for answer in group.answers]
        for one in judged:
            one.advantages, one.returns = self._gae(one)
        self._normalize_advantages(judged)
        before = self._mean_and_std()
        self._see_returns([value for one in judged for value in one.returns])
        after = self._mean_and_std()
        losses: list[tuple[float, float]] = []
        for reuse in range(self._ppo.sample_reuse):
            for part in self._parts(judged, reuse):
                of_actor = self._optimizers[0].step(self._actor_losses(part))
                of_critic = self._optimizers[1].step(self._critic_losses(part, before, after))
                losses.append((of_actor, of_critic))
        self._follow_actor()
        self._adapt_kl(judged)
        self._num_steps += 1
        actor, critic = (sum(each) / len(losses) for each in zip(*losses, strict=True))
        return actor, critic

    def weights(self, role: str) -> dict[str, Tensor]:
        """A role's present parameters."""
        model = {"actor": self._actor, "critic": self._critic, "ref": self._ref}[role]
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}

    # Before the update

    def _judge(self, answer: Answer) -> Judged:
        ids = torch.tensor([answer.ids])
        mean, std = self._mean_and_std()
        with torch.no_grad():
            values = self._critic(ids).logits[0, :, 0] * std + mean
            return Judged(
                answer=answer,
                proximal=_logprobs(self._actor, answer),
                ref=_logprobs(self._ref, answer),
                values=values[answer.prompt_length - 1 :].tolist(),
                score=float(self._reward(ids).logits[0, 0]),
                advantages=[],
                returns=[],
            )

    def _gae(self, one: Judged) -> tuple[list[float], list[float]]:
        ppo, answer = self._ppo, one.answer
        length = len(answer.old_logprobs)
        rewards = [
            -self.kl_coefficient * (old - ref) for old, ref in zip(answer.old_logprobs, one.ref.tolist(), strict=True)
        ]
        rewards[-1] += one.score
        values = list(one.values)
        if not answer.is_cut_off:
            values[length] = 0.0
        advantages, carried = [0.0] * length, 0.0
        for t in reversed(range(length)):
            delta = rewards[t] + ppo.discount * values[t + 1] - values[t]
            carried = delta + ppo.discount * ppo.gae_lambda * carried
            advantages[t] = carried
        return advantages, [advantages[t] + values[t] for t in range(length)]

    def _normalize_advantages(self, judged: Sequence[Judged]) -> None:
        """Over every response token of the batch."""
        every = [value for one in judged for value in one.advantages]
        mean = sum(every) / len(every)
        std = math.sqrt(sum((value - mean) ** 2 for value in every) / len(every))
        for one in judged:
            one.advantages = [(value - mean) / (std + 1e-5) for value in one.advantages]

    # The update

    def _parts(self, judged: Sequence[Judged], reuse: int) -> list[list[Judged]]:
        """The mini-batches of one pass, as the only data-parallel rank deals them."""
        count = self._ppo.n_minibatches
        if count == 1:
            return [list(judged)]
        order = np.random.default_rng([self._seed, self._num_steps, 0, reuse]).permutation(len(judged))
        return [[judged[index] for index in part] for part in np.array_split(order, count)]

    def _actor_losses(self, part: Sequence[Judged]) -> list[Callable[[], Tensor]]:
        """Each answer's share of the loss, to be computed when its turn comes."""
        cap = self._ppo.is_ratio_bounds[1] or math.inf
        kept = [torch.exp(one.proximal - torch.tensor(one.answer.old_logprobs)) <= cap for one in part]
        count = sum(int(mask.sum()) for mask in kept)
        return [_later(self._actor_loss, one, mask, count) for one, mask in zip(part, kept, strict=True)]

    def _actor_loss(self, one: Judged, kept: Tensor, count: int) -> Tensor:
        ppo = self._ppo
        advantages = torch.tensor(one.advantages)
        ratio = torch.exp(_logprobs(self._actor, one.answer) - one.proximal)
        clipped = ratio.clamp(1.0 - ppo.eps_clip, 1.0 + (ppo.eps_clip_high or ppo.eps_clip))
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if ppo.c_clip is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -ppo.c_clip * advantages), loss)
        weight = torch.exp(one.proximal - torch.tensor(one.answer.old_logprobs))
        return (loss * weight)[kept].sum() / count

    def _critic_losses(
        self, part: Sequence[Judged], before: tuple[float, float], after: tuple[float, float]
    ) -> list[Callable[[], Tensor]]:
        count = sum(len(one.returns) for one in part)
        return [_later(self._critic_loss, one, before, after, count) for one in part]

    def _critic_loss(self, one: Judged, before: tuple[float, float], after: tuple[float, float], count: int) -> Tensor:
        start, clip = one.answer.prompt_length - 1, self._value.value_eps_clip
        values = self._critic(torch.tensor([one.answer.ids])).logits[0, start:-1, 0]
        old = (torch.tensor(one.values[:-1]) - before[0]) / before[1]
        returns = (torch.tensor(one.returns) - after[0]) / after[1]
        squares = (values - returns) ** 2
        if clip is not None:
            squares = torch.maximum(squares, (old + (values - old).clamp(-clip, clip) - returns) ** 2)
        return 0.5 * squares.sum() / count

    # What goes on from step to step

    def _mean_and_std(self) -> tuple[float, float]:
        total, squares, weight = self.moments
        if self._value.value_norm == "none" or weight == 0.0:
            return 0.0, 1.0
        mean = total / weight
        return mean, math.sqrt(max(squares / weight - mean**2, 0.01))

    def _see_returns(self, returns: Sequence[float]) -> None:
        decay, count = ppo_critic.VALUE_NORM_DECAY, len(returns)
        sums = sum(returns) / count, sum(value**2 for value in returns) / count, 1.0
        self.moments = [decay * old + (1.0 - decay) * new for old, new in zip(self.moments, sums, strict=True)]

    def _follow_actor(self) -> None:
        if self._ema is not None:
            with torch.no_grad():
                for mine, other in zip(self._ref.parameters(), self._actor.parameters(), strict=True):
                    mine.copy_((1.0 - self._ema) * mine + self._ema * other)

    def _adapt_kl(self, judged: Sequence[Judged]) -> None:
        config = self._ppo.kl
        if config.target is None:
            return
        per_answer = [sum(one.answer.old_logprobs) - float(one.ref.sum()) for one in judged]
        error = min(max(sum(per_answer) / len(judged) / config.target - 1.0, -0.2), 0.2)
        self.kl_coefficient *= 1.0 + error * len(judged) / ppo_batch.KL_HORIZON


class _Optimizer:
    """AdamW on whole tensors; matrices decay, vectors do not."""

    def __init__(self, model: Any, config: OptimizerConfig) -> None:
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._parameters, self._limit = parameters, config.gradient_clipping
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    def step(self, shares: Sequence[Callable[[], Tensor]]) -> float:
        """One update with the sum of the shares, which it returns."""
        self._adamw.zero_grad()
        total = 0.0
        for share in shares:
            loss = share()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._parameters, self._limit)
        self._adamw.step()
        return total


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of all numbers of two models with the same parameters."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def _logprobs(model: Any, answer: Answer) -> Tensor:
    """Of the response tokens."""
    logits = model(torch.tensor([answer.ids])).logits[0]
    chosen = torch.tensor(answer.ids[answer.prompt_length :])
    rows = logits[answer.prompt_length - 1 : -1].log_softmax(-1)
    return rows[torch.arange(len(chosen)), chosen]


def _later(function: Callable[..., Tensor], *arguments: object) -> Callable[[], Tensor]:
    return lambda: function(*arguments)


def _load(model_class: Any, directory: Path) -> Any:
    return model_class.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
