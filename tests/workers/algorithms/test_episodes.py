"""Episodes of several sequences with given tokens in between, against plain loops over what was made."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.inputs.users_code import CallQuestion
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.workers.algorithms.advantage import AdvantageBatch, advantage_named
from corral.workers.algorithms.base import compute_logprobs, deal_mini_batches, response_mask
from corral.workers.algorithms.call_trial import try_call
from corral.workers.algorithms.ppo_actor import PPOActorInterface, batch_stats
from corral.workers.algorithms.ppo_batch import advantage_batch, measure_batch, prepare_actor_sample
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from tests.workers.algorithms.small_engine import SmallEngine
from tests.workers.backends.training_helpers import VOCAB_SIZE

KL_COEFFICIENT = 0.1


@dataclass
class Sequence:
    """Entries are shifted tokens: entry t is of the token at t + 1."""

    made: list[bool]
    kl: list[float]
    turn_rewards: list[float]
    values: list[float]
    """One more: what the critic says after each token."""
    is_cut_off: bool


@dataclass
class Episode:
    outcome: float
    sequences: list[Sequence]


Groups = list[list[Episode]]


def draw_groups(shape: list[list[list[list[bool]]]], seed: int) -> Groups:
    """Groups of episodes of sequences with these tokens made; numbers that float32 adds up exactly, but for the KL."""
    rng = np.random.default_rng(seed)

    def sequence(made: list[bool]) -> Sequence:
        return Sequence(
            made=made,
            kl=(rng.normal(size=len(made)) * 0.3).tolist(),
            turn_rewards=[
                float(rng.integers(-2, 3)) / 4 if is_made and rng.random() < 0.3 else 0.0 for is_made in made
            ],
            values=rng.normal(size=len(made) + 1).tolist(),
            is_cut_off=bool(rng.integers(0, 2)),
        )

    return [
        [Episode(float(rng.integers(-4, 5)) / 4, [sequence(made) for made in episode]) for episode in group]
        for group in shape
    ]


masks = st.lists(st.booleans(), min_size=1, max_size=7)
groups_of_episodes = st.builds(
    draw_groups,
    st.lists(st.lists(st.lists(masks, min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 1000),
)


def pack(groups: Groups) -> SequenceSample:
    """What given tokens have where nobody may look is not a number."""
    samples = []
    for number, group in enumerate(groups):
        rng = np.random.default_rng(number)
        every = [sequence for episode in group for sequence in episode.sequences]
        old = [np.where(one.made, -rng.exponential(size=len(one.made)), np.nan) for one in every]
        samples.append(
            SequenceSample.from_group(
                f"0:{number}",
                {
                    "input_ids": [rng.integers(0, VOCAB_SIZE, len(one.made) + 1) for one in every],
                    "prompt_mask": [[True, *(not made for made in one.made)] for one in every],
                    "old_logprobs": old,
                    "ref_logprobs": [logprobs - one.kl for logprobs, one in zip(old, every, strict=True)],
                    "versions": [np.where(one.made, 3, -1) for one in every],
                    "rewards": [episode.outcome for episode in group for _ in episode.sequences],
                    "seq_no_eos_mask": [one.is_cut_off for one in every],
                    "values": [one.values for one in every],
                    "episodes": [place for place, episode in enumerate(group) for _ in episode.sequences],
                    "turn_rewards": [one.turn_rewards for one in every],
                },
            )
        )
    return SequenceSample.gather(samples)


def given_at(sequence: Sequence) -> dict[int, float]:
    """By made token, its own reward and penalty."""
    return {t: sequence.turn_rewards[t] - KL_COEFFICIENT * sequence.kl[t] for t, m in enumerate(sequence.made) if m}


def total(episode: Episode) -> float:
    return episode.outcome + math.fsum(r for one in episode.sequences for r in given_at(one).values())


def slow_sequence(episode: Episode, place: int, config: PPOConfig) -> dict[int, tuple[float, float]]:
    """By made token, (advantage, return) of a sequence, from its end."""
    sequence, following = episode.sequences[place], episode.sequences[place + 1 :]
    own, made = given_at(sequence), [t for t, is_made in enumerate(sequence.made) if is_made]
    has_values = config.advantage == "gae"
    at_end = episode.outcome + math.fsum(r for one in following for r in given_at(one).values())
    value_after = sequence.values[-1] if has_values and sequence.is_cut_off and not following else 0.0
    found, running, lam = {}, 0.0, config.gae_lambda if has_values else 1.0
    for t in reversed(made):
        value = sequence.values[t] if has_values else 0.0
        reward = own[t] + (at_end if t == made[-1] else 0.0)
        running = reward + config.discount * value_after - value + config.discount * lam * running
        found[t], value_after = (running, running + value), value
    return found


def slow_advantages(groups: Groups, config: PPOConfig) -> Iterator[tuple[int, int, float]]:
    """(group, entry of the packed sample, advantage) of every made token."""
    start = 0
    for number, group in enumerate(groups):
        totals = [total(episode) for episode in group]
        for place, episode in enumerate(group):
            others = totals[:place] + totals[place + 1 :]
            compared = {
                "group_relative": (totals[place] - fmean(totals)) / (pstdev(totals) + 1e-6),
                "rloo": totals[place] - fmean(others) if others else 0.0,
            }
            for index, sequence in enumerate(episode.sequences):
                by_token = slow_sequence(episode, index, config)
                for t in (t for t, is_made in enumerate(sequence.made) if is_made):
                    yield number, start + t, compared.get(config.advantage, by_token[t][0])
                start += len(sequence.made)


def normalised(numbers: list[float]) -> list[float]:
    return [(x - fmean(numbers)) / (pstdev(numbers) + 1e-5) for x in numbers]


def settings_of(advantage: str, **further: Any) -> PPOConfig:
    of_tokens = {"discount": 0.9} if advantage in ("gae", "rewards_to_go") else {}
    of_critic = {"gae_lambda": 0.8} if advantage == "gae" else {}
    kl = {"coef": KL_COEFFICIENT, "place": "reward"}
    return PPOConfig.model_validate({"advantage": advantage, "kl": kl, **of_tokens, **of_critic, **further})


def prepare(sample: SequenceSample, config: PPOConfig) -> SequenceSample:
    estimator, context = advantage_named(config.advantage), ParallelContext()
    return prepare_actor_sample(config, sample, estimator=estimator, kl_coefficient=config.kl.coef, context=context)


@settings(max_examples=25)
@pytest.mark.parametrize("advantage", ["group_relative", "rloo", "rewards_to_go", "gae"])
@given(groups=groups_of_episodes, normalization=st.sampled_from(["none", "batch", "group"]))
def test_advantages_are_those_of_a_loop_over_episodes_and_made_tokens(
    advantage: str, normalization: str, groups: Groups
) -> None:
    config = settings_of(advantage, advantage_normalization=normalization)
    prepared = prepare(pack(groups), config)
    slow = list(slow_advantages(groups, config))
    expected = np.zeros(len(prepared.data["advantages"]))
    parts = [slow] if normalization == "batch" else [[x for x in slow if x[0] == n] for n in range(len(groups))]
    for part in parts:
        numbers = [number for _, _, number in part]
        expected[[entry for _, entry, _ in part]] = numbers if normalization == "none" else normalised(numbers)
    np.testing.assert_allclose(prepared.data["advantages"], expected, rtol=1e-3, atol=1e-3)
    assert prepared.data["loss_mask"].tolist() == [m for g in groups for e in g for s in e.sequences for m in s.made]


@settings(max_examples=15)
@given(groups=groups_of_episodes)
def test_returns_of_a_critic_are_those_of_the_loop(groups: Groups) -> None:
    config = settings_of("gae")
    batch = advantage_batch(config, pack(groups), kl_coefficient=KL_COEFFICIENT)
    expected: list[float] = []
    for episode in (episode for group in groups for episode in group):
        for place, sequence in enumerate(episode.sequences):
            by_token = slow_sequence(episode, place, config)
            expected += [by_token[t][1] if is_made else 0.0 for t, is_made in enumerate(sequence.made)]
    np.testing.assert_allclose(advantage_named("gae")(batch, config)["returns"], expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=15)
@given(groups=groups_of_episodes)
def test_what_is_to_come_undiscounted_is_what_the_episode_was_given_from_there_on(groups: Groups) -> None:
    config = settings_of("rewards_to_go", discount=1.0)
    batch = advantage_batch(config, pack(groups), kl_coefficient=KL_COEFFICIENT)
    actual = advantage_named("rewards_to_go")(batch, config)["advantages"].tolist()
    for episode in (episode for group in groups for episode in group):
        left = total(episode)
        for sequence in episode.sequences:
            own = given_at(sequence)
            for t, number in enumerate(actual[: len(sequence.made)]):
                assert number == pytest.approx(left if sequence.made[t] else 0.0, abs=1e-5)
                left -= own.get(t, 0.0)
            actual = actual[len(sequence.made) :]


@settings(max_examples=15)
@given(groups=groups_of_episodes)
def test_statistics_count_episodes(groups: Groups) -> None:
    sample, context = pack(groups), ParallelContext()
    stats = batch_stats(prepare(sample, settings_of("rloo")), version=4, context=context)
    episodes = [episode for group in groups for episode in group]
    rewards = [e.outcome + math.fsum(r for s in e.sequences for r in s.turn_rewards) for e in episodes]
    lengths = [sum(sum(s.made) for s in e.sequences) for e in episodes]
    assert stats["ppo/num_answers"] == len(episodes)
    assert stats["rewards/mean"] == pytest.approx(fmean(rewards))
    assert stats["rewards/std"] == pytest.approx(pstdev(rewards), abs=1e-6)
    assert stats["turn_rewards/mean"] == pytest.approx(
        fmean(r - e.outcome for r, e in zip(rewards, episodes, strict=True))
    )
    assert stats["sequences/mean"] == fmean(len(e.sequences) for e in episodes)
    assert (stats["response_length/mean"], stats["response_length/max"]) == (fmean(lengths), max(lengths))
    assert stats["no_eos_fraction"] == fmean(e.sequences[-1].is_cut_off for e in episodes)
    assert (stats["staleness/mean"], stats["staleness/max"]) == ((1.0, 1.0) if any(lengths) else (0.0, 0.0))
    facts = measure_batch(sample, context)
    kl = math.fsum(kl for e in episodes for s in e.sequences for kl, made in zip(s.kl, s.made, strict=True) if made)
    assert facts.is_finite and facts.num_answers == len(episodes)
    assert facts.kl_per_answer == pytest.approx(kl / len(episodes), abs=1e-5)


SHAPE = [
    [[[False, True, True, False, True], [False, False, True]], [[True, True, False]], [[False, False]]],
    [[[False, True], [True, False, True, True], [False, False, True, False]], [[True], [False, True, True, True]]],
]
"""Episodes of one to three sequences, two of which end in given tokens; one episode has made nothing."""


def slow_step(engine: SmallEngine, sample: SequenceSample, prepared: SequenceSample, config: PPOConfig) -> float:
    """One update by the plain loop on the same model; returns the loss."""
    episodes: dict[tuple[str, int], list[torch.Tensor]] = {}
    numbers = iter(np.asarray(sample.data["episodes"]).tolist())
    shifted = answer_slices(sample.answer_lengths("old_logprobs"))
    names = [uid for uid, count in zip(sample.uids, sample.num_answers_per_sample(), strict=True) for _ in range(count)]
    for name, place, entries in zip(names, answer_slices(sample.answer_lengths()), shifted, strict=True):
        ids = torch.from_numpy(np.asarray(sample.data["input_ids"][place], np.int64))
        logprobs = torch.log_softmax(engine.states(ids), dim=-1)
        of_episode = episodes.setdefault((name, next(numbers)), [])
        for t, index in enumerate(range(entries.start, entries.stop)):
            if sample.data["prompt_mask"][place][t + 1]:
                continue
            ratio = torch.exp(logprobs[t, ids[t + 1]] - float(sample.data["old_logprobs"][index]))
            advantage = float(prepared.data["advantages"][index])
            of_episode.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)))
    kept = [torch.stack(losses) for losses in episodes.values() if losses]
    if config.loss_reduction == "token_mean":
        loss = torch.cat(kept).mean()
    elif config.loss_reduction == "answer_mean":
        loss = torch.stack([losses.mean() for losses in kept]).mean()
    else:
        assert config.loss_divisor is not None
        loss = torch.stack([losses.sum() / config.loss_divisor for losses in kept]).mean()
    parameters = list(engine.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.data -= 0.5 * gradient
    return float(loss.detach())


@pytest.mark.parametrize("max_tokens", [6, 11, 1000])
@pytest.mark.parametrize("reduction", ["token_mean", "answer_mean", "fixed_divisor"])
def test_an_update_is_that_of_a_loop_over_episodes_however_their_sequences_are_cut_into_micro_batches(
    reduction: str, max_tokens: int
) -> None:
    config = PPOConfig.model_validate(
        {"use_decoupled_loss": False, "loss_reduction": reduction, "advantage": "rewards_to_go", "discount": 0.9}
        | ({"loss_divisor": 16} if reduction == "fixed_divisor" else {})
    )
    sample, plain = pack(draw_groups(SHAPE, 7)), SmallEngine("lm")
    noise = 0.3 * np.random.default_rng(0).normal(size=sample.total_length("old_logprobs")).astype(np.float32)
    sample = sample.with_key("old_logprobs", compute_logprobs(plain, sample) + noise)
    engine = SmallEngine("lm", max_tokens=max_tokens)
    stats = PPOActorInterface(config).train_step(engine, sample, version=4)
    loss = slow_step(plain, sample, prepare(sample, config), config)
    assert stats["ppo/loss"] == pytest.approx(loss, abs=1e-6)
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(engine.model.state_dict()[name], tensor, atol=1e-6, rtol=0.0)


def test_mini_batches_deal_whole_episodes() -> None:
    sample = prepare(pack(draw_groups(SHAPE * 3, 1)), settings_of("rloo"))
    parts = list(deal_mini_batches(PPOConfig(n_minibatches=4), sample, seed=(1, 2, 0)))
    dealt = [
        (one.uids[0], number)
        for part in parts
        for one in part.unpack()
        for number in set(one.data["episodes"].tolist())
    ]
    assert sorted(dealt) == [(f"0:{n}", e) for n, group in enumerate(SHAPE * 3) for e in range(len(group))]
    assert sorted(size for part in parts for size in part.episode_sizes()) == sorted(sample.episode_sizes())
    assert [len(part.episode_sizes()) for part in parts] == [4, 4, 4, 3]


def branched(is_branch: bool) -> SequenceSample:
    """Two episodes; the first asks a tool, and is one sequence, or one and a branch that has what was made as given."""
    first, second = [8, 9, 30, 31, 12, 13], [8, 40]
    made = [[False, True, False, False, True, True], [False, True]]
    whole = {"input_ids": [first, second], "prompt_mask": [[not m for m in mask] for mask in made]}
    if is_branch:
        masks = [made[0][:2], [False] * 4 + [True] * 2, made[1]]
        whole = {"input_ids": [first[:2], first, second], "prompt_mask": [[not m for m in mask] for mask in masks]}
    count = len(whole["input_ids"])
    return SequenceSample.from_group(
        "0:a",
        {
            **whole,
            "rewards": [1.0] * (count - 1) + [0.0],
            "episodes": [0] * (count - 1) + [1],
            "turn_rewards": [np.zeros(len(ids) - 1) for ids in whole["input_ids"]],
            "seq_no_eos_mask": [False] * count,
            "old_logprobs": [np.full(len(ids) - 1, -4.0) for ids in whole["input_ids"]],
        },
    )


@pytest.mark.parametrize("reduction", ["token_mean", "answer_mean", "fixed_divisor"])
@pytest.mark.parametrize("normalization", ["none", "group"])
def test_a_branch_trains_no_token_again_and_moves_no_statistic(normalization: str, reduction: str) -> None:
    config = PPOConfig.model_validate(
        {"use_decoupled_loss": False, "advantage_normalization": normalization, "loss_reduction": reduction}
        | ({"loss_divisor": 16} if reduction == "fixed_divisor" else {})
    )
    learned = []
    for is_branch in (False, True):
        sample, engine = branched(is_branch), SmallEngine("lm", max_tokens=7)
        stats = PPOActorInterface(config).train_step(engine, sample, version=4)
        advantages = prepare(sample, config).data["advantages"][response_mask(sample)]
        learned.append((stats, advantages.tolist(), engine.model.state_dict()))
    (whole, advantages, weights), (cut, same_advantages, same_weights) = learned
    assert cut.pop("sequences/mean") == 1.5 and whole.pop("sequences/mean") == 1.0
    assert cut == pytest.approx(whole, abs=1e-6) and cut["train/tokens"] == 4.0
    assert same_advantages == pytest.approx(advantages, abs=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(same_weights[name], tensor, atol=1e-6, rtol=0.0)


def test_an_episode_came_out_as_its_last_sequence_says() -> None:
    """A reward model scores each sequence; a sequence before the last that was cut off cuts no episode off."""
    sample = pack(draw_groups([[[[True], [True]], [[True]]]], 0))
    sample.data["rewards"] = np.array([5.0, 1.0, 2.0], np.float32)
    sample.data["turn_rewards"] = np.zeros(3, np.float32)
    sample.data["seq_no_eos_mask"] = np.array([True, False, True])
    config = PPOConfig(mask_no_eos_with_zero=True)
    assert advantage_batch(config, sample, kl_coefficient=0.0).episode_rewards.tolist() == [1.0, 0.0]


@settings(max_examples=10)
@pytest.mark.parametrize("advantage", ["group_relative", "rloo", "rewards_to_go", "gae"])
@given(groups=groups_of_episodes)
def test_episodes_of_one_sequence_are_answers_bit_for_bit(advantage: str, groups: Groups) -> None:
    single = [
        [Episode(e.outcome, [replace(s, turn_rewards=[0.0] * len(s.made))]) for e in g for s in e.sequences]
        for g in groups
    ]
    sample = pack(single)
    plain = sample.select_keys([key for key in sample.data if key not in ("episodes", "turn_rewards")])
    config = settings_of(advantage, loss_reduction="answer_mean")
    prepared, expected = prepare(sample, config), prepare(plain, config)
    for key in ("advantages", "loss_mask"):
        np.testing.assert_array_equal(prepared.data[key], expected.data[key])
    stats = [batch_stats(one, version=4, context=ParallelContext()) for one in (prepared, expected)]
    assert {**stats[0], **stats[1]} == stats[0]


def _refuses_one_sequence_each(batch: AdvantageBatch, config: PPOConfig) -> dict[str, torch.Tensor]:
    assert list(batch.episode_sizes) == [2, 1, 1] and list(batch.episodes_per_group) == [1, 2]
    raise LookupError("it was tried")


def test_what_is_of_ones_own_is_tried_on_an_episode_of_two_sequences() -> None:
    keys = ("input_ids", "prompt_mask", "old_logprobs", "rewards", "seq_no_eos_mask", "episodes", "turn_rewards")
    call = ModelFunctionCall(
        name="actor_train",
        model_name=ModelName("actor"),
        call_type=CallType.TRAIN_STEP,
        implementation="ppo_actor",
        n_seqs=1,
        input_keys=keys,
    )
    own = f"{__name__}:{_refuses_one_sequence_each.__name__}"
    question = CallQuestion(import_path=own, call=call, head="lm", ppo=PPOConfig(advantage=own), declared=())
    with pytest.raises(LookupError, match="it was tried"):
        try_call(question)
