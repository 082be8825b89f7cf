"""Held-out rows through the calls of an evaluation: which calls run on which rows, and means over all of them."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.dataflow import DataflowGraph, build_dataflow
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.workers.data.held_out import added, sums_of, unjudged_text
from corral.workers.data.prompts import is_held_out, split_uid
from corral.workers.master.evaluations import evaluate_by_call, merge_slices
from corral.workers.master.sample_source import BufferedSample, SequenceBuffer
from corral.workers.requests.messages import StatsReply


@given(st.lists(st.lists(st.floats(0.0, 5.0), max_size=5), min_size=1, max_size=6))
def test_means_over_goes_are_means_over_all_rows(losses: list[list[float]]) -> None:
    slices = [
        ({"loss": mean, "perplexity": math.exp(mean), "count": float(len(go))}, 1)
        for go in losses
        for mean in [sum(go) / max(len(go), 1)]
    ]
    everything = [loss for go in losses for loss in go]
    mean = sum(everything) / max(len(everything), 1)
    expected = {"loss": mean, "perplexity": math.exp(mean), "count": float(len(everything))}
    assert merge_slices(slices) == pytest.approx(expected)


def test_statistics_without_a_count_are_weighed_by_rows() -> None:
    assert merge_slices([({"score": 1.0}, 3), ({"score": 5.0}, 1)]) == {"score": 2.0, "count": 4.0}


class Ranks:
    """One rank that reads rows and runs calls, and writes down what it is asked."""

    def __init__(self, graph: DataflowGraph, buffer: SequenceBuffer) -> None:
        self.graph, self.buffer = graph, buffer
        self.asked: list[tuple[str, list[str]]] = []
        self.held: set[str] = set()

    async def load_rows(self, uids: Sequence[str]) -> list[BufferedSample]:
        self.held.update(uids)
        return [
            BufferedSample(
                uid=uid, order=0, owner=0, num_tokens=[3], versions=frozenset(), keys=frozenset({"input_ids"})
            )
            for uid in uids
        ]

    def clear(self, uids_by_rank: Mapping[int, Sequence[str]]) -> None:
        self.held.difference_update(uids_by_rank.get(0, ()))

    async def run_call(
        self, call: ModelFunctionCall, uids: Sequence[str], *, is_last_slice: bool, version: int
    ) -> None:
        assert version == 7 and self.held.issuperset(uids) and all(map(is_held_out, uids))
        self.asked.append((call.name + ("" if is_last_slice else "..."), [split_uid(uid)[1] for uid in uids]))

    async def evaluate(self, call: ModelFunctionCall, uids: Sequence[str], *, version: int) -> StatsReply:
        await self.run_call(call, uids, is_last_slice=True, version=version)
        return StatsReply(stats={"loss": float(len(uids))})


def call(name: str, call_type: CallType, reads: tuple[str, ...], *makes: str, n_seqs: int) -> ModelFunctionCall:
    role = name.partition("_")[0]
    return ModelFunctionCall(
        name=name,
        model_name=ModelName(role),
        call_type=call_type,
        implementation="dpo",
        n_seqs=n_seqs,
        input_keys=reads,
        output_keys=makes,
    )


CALLS = [
    call("ref_inf", CallType.INFERENCE, ("input_ids",), "ref_logprobs", n_seqs=2),
    call("reward_inf", CallType.INFERENCE, ("input_ids",), "rewards", n_seqs=2),
    call("actor_train", CallType.TRAIN_STEP, ("input_ids", "ref_logprobs", "rewards"), n_seqs=4),
    call("actor_looks", CallType.EVALUATE, ("input_ids", "ref_logprobs"), n_seqs=3),
    call("actor_answers", CallType.EVALUATE, (), n_seqs=3),
]


def evaluate(name: str) -> tuple[Ranks, dict[str, float]]:
    graph, buffer = build_dataflow(CALLS, ["input_ids"]), SequenceBuffer(is_consumed=lambda uid: False)
    ranks = Ranks(graph, buffer)
    fakes = cast(Any, ranks), cast(Any, ranks)
    stats = asyncio.run(evaluate_by_call(graph.call(name), *fakes, "abcde", step=7)).stats
    assert not buffer.samples and not ranks.held
    return ranks, stats


def test_calls_make_what_an_evaluation_reads_and_nothing_else_a_go_at_a_time() -> None:
    ranks, stats = evaluate("actor_looks")
    assert ranks.asked == [
        ("ref_inf...", ["a", "b"]),
        ("ref_inf", ["c"]),
        ("actor_looks", ["a", "b", "c"]),
        ("ref_inf", ["d", "e"]),
        ("actor_looks", ["d", "e"]),
    ]
    assert stats == {"loss": (3 * 3 + 2 * 2) / 5, "count": 5.0}


def test_a_call_with_problems_of_its_own_is_asked_once_and_gets_no_rows() -> None:
    ranks, stats = evaluate("actor_answers")
    assert (ranks.asked, stats) == ([("actor_answers", [])], {"loss": 0.0})


def test_held_out_answers_without_a_reward_are_told_with_the_first_failure_of_their_data_set() -> None:
    sums = added(sums_of([1.0], [3]), sums_of([], [], asked=4))
    failure = "reward_error: KeyError: 'result' (my_reward.py:3)"
    assert unjudged_text("easy", sums, failure) == f"1 of 2 held-out problems of easy have no reward: {failure}"
    assert unjudged_text("", sums, failure) == f"1 of 2 held-out problems have no reward: {failure}"
