"""Rows that have prompts once: what is shared, which token is where, and which answers go together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.keys import ROUTED_EXPERTS, routed_experts_key
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, plan_micro_batches
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.shared_prompts import Beginnings, PromptGroup
from tests.workers.backends.training_helpers import make_sample
from tests.workers.shared_prompts.scene import grouped_batch

FEW_TOKENS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=5)
SAMPLES = st.lists(FEW_TOKENS, min_size=1, max_size=4).map(
    lambda groups: SequenceSample.gather(
        [SequenceSample.from_group(f"0:{number}", {"input_ids": group}) for number, group in enumerate(groups)]
    )
)


def shared_rows(sample: SequenceSample, spec: MicroBatchSpec, *, keeps_groups: bool = False) -> list[MicroBatch]:
    plan = plan_micro_batches(sample, spec, keeps_groups=keeps_groups, shares_prompts=True)
    return list(make_micro_batches(sample, plan, count=len(plan), device=torch.device("cpu"), shares_prompts=True))


@given(sample=SAMPLES, budget=st.integers(9, 40))
def test_a_row_has_every_token_of_its_answers_and_asks_for_each_of_them_but_the_first(
    sample: SequenceSample, budget: int
) -> None:
    lengths = sample.answer_lengths()
    ids = np.split(sample.data["input_ids"], np.cumsum(lengths)[:-1])
    rows = shared_rows(sample, MicroBatchSpec(max_tokens_per_micro_batch=budget))
    assert sorted(answer for row in rows for answer in row.answers) == list(range(len(lengths)))
    for row in rows:
        expected = np.concatenate([ids[answer] for answer in row.answers])
        positions = np.concatenate([np.arange(lengths[answer]) for answer in row.answers])
        assert len(row.input_ids) <= budget
        assert row.segment_lengths == tuple(lengths[answer] for answer in row.answers)
        if row.shared is None:
            assert row.input_ids.tolist() == expected.tolist()
            continue
        places = row.shared.indices
        assert row.input_ids[places].tolist() == expected.tolist()
        assert row.position_ids[places].tolist() == positions.tolist()
        assert set(places.tolist()) == set(range(len(row.input_ids)))
        assert row.shared.labels[row.shared.questions].tolist() == row.labels.tolist()
        asked_at = row.shared.predicting[row.shared.questions]
        assert asked_at.tolist() == places[row.predicting].tolist()
        pairs = {(int(places[t]), int(places[t + 1])) for t in row.predicting.tolist()}
        assert len(row.shared.labels) == len(pairs)


@given(answers=FEW_TOKENS)
def test_answers_share_what_all_of_them_begin_with_and_each_keeps_a_token(answers: list[list[int]]) -> None:
    sample = SequenceSample.from_group("0:a", {"input_ids": answers})
    expected = 0
    while len(answers) > 1 and all(
        len(answer) > expected + 1 and answer[expected] == answers[0][expected] for answer in answers
    ):
        expected += 1
    assert Beginnings(sample).shared_by(range(len(answers))) == expected


@pytest.mark.parametrize(("answer", "token", "shared"), [(1, 3, 3), (2, 0, 0), (2, 8, 8), (0, 9, 9)])
def test_answers_share_their_prompt_as_far_as_the_same_experts_computed_it(
    answer: int, token: int, shared: int
) -> None:
    sample = grouped_batch(0, prompts=[9], answers=[[3, 4, 2]])
    rows = np.zeros((sum(sample.answer_lengths()), 2, 2), np.int16)
    rows[sum(sample.answer_lengths()[:answer]) + token, 1, 0] = 5
    routed = sample.with_key(routed_experts_key(num_layers=2, top_k=2), rows.reshape(-1))
    assert Beginnings(routed).shared_by(range(3)) == shared
    [row] = shared_rows(routed, MicroBatchSpec())
    assert row.routed_experts is not None and ROUTED_EXPERTS not in row.tensors
    if row.shared is not None:
        told = row.routed_experts[row.shared.indices]
        expected = torch.cat(
            [torch.from_numpy(part) for part in np.split(rows, np.cumsum(sample.answer_lengths())[:-1])]
        )
        order = np.argsort(row.answers)
        by_answer = torch.split(told, list(row.segment_lengths))
        assert torch.equal(torch.cat([by_answer[number] for number in order]), expected)


def test_a_prompt_that_does_not_fit_with_all_of_its_answers_is_there_once_in_each_of_few_rows() -> None:
    sample = grouped_batch(0, prompts=[20], answers=[[10, 9, 8, 7, 6]])
    rows = shared_rows(sample, MicroBatchSpec(max_tokens_per_micro_batch=40))
    assert [row.shared.groups for row in rows if row.shared] == [
        (PromptGroup(20, (9, 10)),),
        (PromptGroup(20, (7, 8)),),
    ]
    assert sorted(len(row.input_ids) for row in rows) == [26, 35, 39]


def test_a_row_may_have_several_prompts_and_answers_that_share_nothing() -> None:
    sample = grouped_batch(0, prompts=[9, 30, 5], answers=[[3, 8], [6], [20, 4]])
    [row] = shared_rows(sample, MicroBatchSpec())
    assert row.shared is not None
    assert row.shared.groups == (PromptGroup(9, (3, 8)), PromptGroup(5, (4, 20)), PromptGroup(0, (36,)))


def test_pairs_that_a_loss_compares_stay_together_in_their_order() -> None:
    sample = grouped_batch(0, prompts=[9, 12], answers=[[8, 3], [2, 5]])
    rows = shared_rows(sample, MicroBatchSpec(max_tokens_per_micro_batch=20), keeps_groups=True)
    assert sorted(row.answers for row in rows) == [(0, 1), (2, 3)]
    assert [len(row.input_ids) for row in rows] == [20, 19]


def test_prompts_are_not_shared_where_there_would_be_too_few_micro_batches() -> None:
    sample = grouped_batch(0, prompts=[9], answers=[[3, 8, 5]])
    rows = shared_rows(sample, MicroBatchSpec(n_min=2))
    assert len(rows) == 2


def test_an_answer_that_no_micro_batch_holds_is_refused_as_ever() -> None:
    sample = grouped_batch(0, prompts=[9], answers=[[3, 8]])
    with pytest.raises(ValueError, match="has 17 tokens but a micro-batch holds at most 16"):
        plan_micro_batches(sample, MicroBatchSpec(max_tokens_per_micro_batch=16), shares_prompts=True)


def test_answers_that_share_nothing_are_packed_as_without_sharing() -> None:
    rng = np.random.default_rng(0)
    sample = make_sample([[int(length) for length in rng.integers(2, 30, 5)] for _ in range(4)])
    ids = sample.data["input_ids"]
    ids[np.cumsum([0, *sample.answer_lengths()[:-1]])] = range(20)  # no two begin with the same token
    spec = MicroBatchSpec(max_tokens_per_micro_batch=48)
    plan = plan_micro_batches(sample, spec, shares_prompts=True)
    assert plan == plan_micro_batches(sample, spec)
    assert all(row.shared is None for row in shared_rows(sample, spec))
