"""What a teacher adds to the advantages, against sums over a whole vocabulary and beside rewards."""

from typing import Any

import numpy as np
import pytest
import torch

from corral.experiments.config.algorithm import PPOConfig
from corral.scheduling.keys import Key
from corral.workers.algorithms.advantage import advantage_named
from corral.workers.algorithms.base import compute_logprobs, response_mask
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.algorithms.ppo_batch import prepare_actor_sample
from corral.workers.algorithms.teacher import TeacherInterface, with_teachers_merged
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.algorithms.small_engine import SmallEngine
from tests.workers.backends.training_helpers import make_sample


def taught_sample(teacher: SmallEngine, student: SmallEngine) -> SequenceSample:
    """Answers of nobody in particular, as both see them."""
    sample = make_sample([[6, 9, 12, 5], [7, 8, 6, 10]])
    of_student, of_teacher = (compute_logprobs(engine, sample) for engine in (student, teacher))  # type: ignore[arg-type]
    return sample.with_key("old_logprobs", of_student).with_key("teacher_logprobs", of_teacher)


def advantages_of(settings: dict[str, Any], sample: SequenceSample) -> np.ndarray[Any, Any]:
    config = PPOConfig.model_validate(settings)
    estimator = advantage_named(config.advantage)
    prepared = prepare_actor_sample(config, sample, estimator=estimator, kl_coefficient=0.0, context=ParallelContext())
    return np.asarray(prepared.data["advantages"])


def test_advantages_are_what_the_teacher_finds_likelier_beside_those_of_rewards() -> None:
    sample = taught_sample(SmallEngine("lm"), SmallEngine("lm"))
    noise = np.random.default_rng(0).normal(size=len(sample.data["old_logprobs"])).astype(np.float32)
    sample = sample.with_key("teacher_logprobs", sample.data["old_logprobs"] + noise)  # on prompts, too
    sample.data["rewards"] = np.array([1, 0, 0, 1, 0, 0, 1, 0], np.float32)
    mask = response_mask(sample)
    alone = advantages_of({"algorithm": "distillation"}, sample)
    np.testing.assert_allclose(alone, np.where(mask, noise, 0.0), atol=1e-6)
    rewarded = {"advantage_normalization": "batch"}
    both = advantages_of({**rewarded, "distillation": {"coef": 0.25}}, sample)
    np.testing.assert_allclose(both, advantages_of(rewarded, sample) + 0.25 * alone, atol=1e-6)


def test_the_mean_policy_gradient_by_a_teacher_is_that_of_the_reverse_kl() -> None:
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=5), requires_grad=True)
    teacher = torch.log_softmax(torch.tensor(rng.normal(size=5)), 0)
    policy = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    advantages = (teacher - policy).detach()
    (estimated,) = torch.autograd.grad(-(policy.detach().exp() * advantages * policy).sum(), logits)
    torch.testing.assert_close(estimated, exact, atol=1e-12, rtol=0.0)


def test_each_teacher_says_of_its_own_rows_what_one_of_all_would_say() -> None:
    engine: Any = _Recording("lm")
    sample = make_sample([[6, 9], [7], [5, 8, 4]])
    sample = SequenceSample(["0:a/1", "0:b/1", "1:a/2"], sample.seqlens, sample.data)
    (whole,) = TeacherInterface(temperature=1.0).inference(engine, sample).values()
    for source in ("a", "b", "c"):
        (part,) = TeacherInterface(temperature=1.0, sources=[source]).inference(engine, sample).values()
        sample = sample.with_key(Key(f"teacher_logprobs_{source}", "per_shifted_token", "float32"), part)
    assert engine.computed == [sample.uids, ["0:a/1", "1:a/2"], ["0:b/1"], []]
    np.testing.assert_array_equal(with_teachers_merged(sample, ("a", "b", "c")).data["teacher_logprobs"], whole)


class _Recording(SmallEngine):
    """One that says what it was asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.computed: list[list[str]] = []

    def forward(self, sample: SequenceSample, **how: Any) -> dict[str, Any]:
        self.computed.append(sample.uids)
        return super().forward(sample, **how)


def test_a_student_comes_nearer_to_its_teacher_without_any_reward() -> None:
    torch.manual_seed(1)
    teacher, student = SmallEngine("lm"), SmallEngine("lm", lr=0.1)
    with torch.no_grad():
        teacher.model["head"].bias += torch.randn_like(teacher.model["head"].bias)
    interface = PPOActorInterface(PPOConfig.model_validate({"algorithm": "distillation"}))
    far = [
        interface.train_step(student, taught_sample(teacher, student), version=version)["ppo/teacher_kl"]  # type: ignore[arg-type]
        for version in range(3)
    ]
    sample = taught_sample(teacher, student)
    wanted = (sample.data["old_logprobs"] - sample.data["teacher_logprobs"])[response_mask(sample)].mean()
    assert far[0] > far[1] > far[2] > float(wanted)
    held = interface.train_step(student, sample, version=3)["ppo/teacher_kl"]  # type: ignore[arg-type]
    assert held == pytest.approx(float(wanted), abs=1e-5)
