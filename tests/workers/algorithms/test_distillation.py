"""What a teacher adds to the advantages, against sums over a whole vocabulary and beside rewards."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.config.algorithm import PPOConfig
from corral.scheduling.keys import built_in, keys_of_teachers, teacher_keys, teacher_prompt_key
from corral.workers.algorithms.advantage import advantage_named
from corral.workers.algorithms.base import compute_logprobs, response_mask
from corral.workers.algorithms.functional.kl import kl_over_top_k
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.algorithms.ppo_batch import prepare_actor_sample
from corral.workers.algorithms.teacher import TeacherInterface, with_teachers_merged
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from corral.workers.data.teacher_prompts import padded_prompt
from tests.workers.algorithms.small_engine import SmallEngine
from tests.workers.backends.test_fsdp import make_engine
from tests.workers.backends.training_helpers import VOCAB_SIZE, load_reference, make_sample, save_tiny_model


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


def slow_kl(logprobs: list[float], teacher: list[float], *, is_forward: bool) -> float:
    """Over these tokens and all others as one."""
    policy, other = ([*row, math.log(max(1.0 - math.fsum(map(math.exp, row)), 1e-6))] for row in (logprobs, teacher))
    given, compared = (other, policy) if is_forward else (policy, other)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(given, compared, strict=True))


@given(k=st.integers(1, 6), is_forward=st.booleans(), seed=st.integers(0, 999))
def test_the_divergence_over_the_likeliest_is_at_most_that_over_all_and_equals_it_for_all(
    k: int, is_forward: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(2 * rng.normal(size=(4, 6)), requires_grad=True)
    policy, teacher = torch.log_softmax(logits, -1), torch.log_softmax(torch.tensor(2 * rng.normal(size=(4, 6))), -1)
    given, other = (teacher, policy) if is_forward else (policy, teacher)
    full = (given.exp() * (given - other)).sum(-1)
    told, ids = teacher.topk(k)
    found = kl_over_top_k(policy.gather(1, ids), told, is_forward=is_forward)
    slow = [
        slow_kl(*rows, is_forward=is_forward)
        for rows in zip(policy.gather(1, ids).tolist(), told.tolist(), strict=True)
    ]
    np.testing.assert_allclose(found.detach(), slow, atol=1e-9)
    assert bool((found <= full + 1e-9).all()) and bool((found >= -1e-9).all())
    if k == 6:
        torch.testing.assert_close(found, full, atol=1e-9, rtol=0.0)
        (exact,) = torch.autograd.grad(full.sum(), logits, retain_graph=True)
        (actual,) = torch.autograd.grad(found.sum(), logits)
        torch.testing.assert_close(actual, exact, atol=1e-9, rtol=0.0)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_a_step_over_the_whole_vocabulary_follows_the_gradient_of_the_full_divergence(divergence: str) -> None:
    teacher, student = _teacher_and_student()
    sample = taught_sample(teacher, student)
    ids, told = teacher.forward(sample, top_k=VOCAB_SIZE).values()
    for key, values in zip(teacher_keys(VOCAB_SIZE), (ids, told), strict=True):
        sample = sample.with_key(key, values.astype(key.dtype))
    sample.data["teacher_topk_logprobs"].reshape(-1, VOCAB_SIZE)[~response_mask(sample)] = np.nan  # nobody reads them
    answers = torch.split(torch.as_tensor(sample.data["input_ids"]).long(), sample.answer_lengths())

    def table(engine: SmallEngine) -> torch.Tensor:
        states = torch.cat([engine.states(answer)[:-1] for answer in answers])
        return torch.log_softmax(states.double(), -1)[torch.from_numpy(response_mask(sample))]

    given, other = (teacher, student) if divergence == "forward_kl" else (student, teacher)
    mean = (table(given).exp() * (table(given) - table(other))).sum(-1).mean()
    student.model.zero_grad()
    torch.autograd.backward(mean)
    expected = [p.detach() - student._lr * p.grad for p in student.model.parameters() if p.grad is not None]
    settings = {"algorithm": "distillation", "distillation": {"top_k": VOCAB_SIZE, "divergence": divergence}}
    stats = PPOActorInterface(PPOConfig.model_validate(settings)).train_step(student, sample, version=0)  # type: ignore[arg-type]
    assert stats["ppo/teacher_kl"] == pytest.approx(float(mean.detach()), abs=1e-5)
    for found, wanted in zip(student.model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, atol=1e-6, rtol=0.0)


def _teacher_and_student() -> tuple[SmallEngine, SmallEngine]:
    torch.manual_seed(1)
    teacher, student = SmallEngine("lm"), SmallEngine("lm", lr=0.1)
    with torch.no_grad():
        teacher.model["head"].bias += torch.randn(VOCAB_SIZE)
    return teacher, student


@pytest.mark.parametrize("top_k", [None, 3])
def test_each_teacher_says_of_its_own_rows_what_one_of_all_would_say(top_k: int | None) -> None:
    engine: Any = _Recording("lm")
    sample = make_sample([[6, 9], [7], [5, 8, 4]])
    sample = SequenceSample(["0:a/1", "0:b/1", "1:a/2"], sample.seqlens, sample.data)
    whole = TeacherInterface(temperature=1.0, top_k=top_k).inference(engine, sample)
    for source in ("a", "b", "c"):
        made = TeacherInterface(temperature=1.0, top_k=top_k, sources=[source]).inference(engine, sample)
        for key, values in zip(keys_of_teachers([source], top_k), made.values(), strict=True):
            sample = sample.with_key(key, values)
    assert engine.computed == [sample.uids, ["0:a/1", "1:a/2"], ["0:b/1"], []]
    merged = with_teachers_merged(sample, ("a", "b", "c"), top_k)
    assert set(merged.data) == {*make_sample([[6]]).data, *whole}
    for name, values in whole.items():
        np.testing.assert_array_equal(merged.data[name], values)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("warmth", [{}, {"temperatures": (0.7, 0.4, 1.0, 2.0, 0.9, 1.3)}], ids=["trial", "rows"])
def test_a_teacher_that_is_told_more_says_of_each_token_what_it_says_behind_its_own_prompt(
    tmp_path: Path, top_k: int | None, warmth: Mapping[str, Sequence[float]]
) -> None:
    engine, reference = make_engine(save_tiny_model(tmp_path)), load_reference(tmp_path).double()
    sample = make_sample([[6, 9], [7], [5, 3, 4]])
    sample = SequenceSample(["0:a/1", "0:b/1", "1:a/2"], sample.seqlens, sample.data)
    prompts = [
        [9, 8, 7, 6, 5],
        [9, 8, 7, 6, 5],
        [1],
        [3, 2],
        [3, 2],
        [3, 2],
    ]  # longer and shorter than those of 2 tokens
    told = sample.with_key(teacher_prompt_key(6), np.concatenate([padded_prompt(one, 6) for one in prompts]))
    for key in built_in(*warmth):
        told = told.with_key(key, np.array(warmth[key.name], np.float32))
    temperatures = warmth.get("temperatures", (0.7,) * len(prompts))
    interface = TeacherInterface(temperature=0.7, top_k=top_k, sources=["a"])
    made = [values.reshape(-1, top_k or 1) for values in interface.inference(engine, told).values()]
    first = 0
    for number, (place, prompt) in enumerate(zip(answer_slices(sample.answer_lengths()), prompts, strict=True)):
        answer = sample.data["input_ids"][place].tolist()[2:]
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits / temperatures[number], -1)
        found = [values[first : first + 1 + len(answer)] for values in made]
        first += 1 + len(answer)
        if number == 2:  # another teacher's
            assert not any(values.any() for values in found)
            continue
        expected: Any = table.topk(top_k) if top_k else [table.gather(1, torch.tensor(answer)[:, None])]
        np.testing.assert_allclose(found[-1][1:], expected[0], atol=1e-5)
        if top_k:
            assert found[0][1:].tolist() == expected[1].tolist()
        assert not any(values[0].any() for values in found), "nothing is said of the policy's prompt"


class _Recording(SmallEngine):
    """One that says what it was asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.computed: list[list[str]] = []

    def forward(self, sample: SequenceSample, **how: Any) -> dict[str, Any]:
        self.computed.append(sample.uids)
        return super().forward(sample, **how)


def test_a_student_comes_nearer_to_its_teacher_without_any_reward() -> None:
    teacher, student = _teacher_and_student()
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
