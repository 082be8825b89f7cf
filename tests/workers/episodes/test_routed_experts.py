"""The experts of an answer come together over its requests, and into the sample: each row as it was said first."""

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.workers.episodes.partial_answer import MalformedEventError, PartialAnswer
from corral.workers.episodes.routed_experts import AnswerExperts
from corral.workers.episodes.stream_events import StreamEvent
from corral.workers.episodes.trajectories import make_sample
from tests.workers.engine.tiny_models import EXPERT_LAYERS, NUM_EXPERTS, TOP_K, save_tiny_model
from tests.workers.episodes.one_turn import judged_answers
from tests.workers.rollout.engine_servers import sample_in_turns

SPEC = RoutedExpertsSpec(num_layers=3, expert_layers=tuple(EXPERT_LAYERS), num_experts=NUM_EXPERTS, top_k=TOP_K)
PROMPT = [7, 9, 11]


def text_of(rows: npt.NDArray[Any]) -> str:
    """As SGLang 0.5 writes it: base64.b64encode of the bytes of an int32 tensor [tokens, layers, k]."""
    return base64.b64encode(rows.astype(np.int32).tobytes()).decode()


def draw_rows(num_tokens: int, *, seed: int) -> npt.NDArray[np.int64]:
    """For all layers; what stands in the dense one has no meaning."""
    return np.random.default_rng(seed).integers(0, NUM_EXPERTS, (num_tokens, SPEC.num_layers, TOP_K))


def end_of_request(num_tokens: int, *, reason: str, experts: str | None) -> StreamEvent:
    meta = {
        "completion_tokens": num_tokens,
        "output_token_logprobs": [[-0.5, 1, None]] * num_tokens,
        "weight_versions": [{"version": "1.1", "start": 0, "end": num_tokens}],
        "finish_reason": {"type": reason},
        "routed_experts": experts,
    }
    return msgspec.convert({"output_ids": [1] * num_tokens, "meta_info": meta}, StreamEvent)


def sample_rows(answer: PartialAnswer, prompt: list[int] = PROMPT) -> npt.NDArray[np.int16]:
    """[tokens, layers with experts, k] of the sample that an answer becomes."""
    sample = make_sample("0:a", judged_answers(prompt_ids=prompt, answers=[answer], rewards=[1.0]), experts=SPEC)
    assert sample.data["routed_experts"].dtype == np.int16
    assert sample.seqlens["routed_experts"][0][0] == len(sample.data["input_ids"]) * len(EXPERT_LAYERS) * TOP_K
    return sample.data["routed_experts"].reshape(-1, len(EXPERT_LAYERS), TOP_K)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6))
def test_a_row_is_what_the_request_said_whose_weights_made_the_token_after_it(requests: list[tuple[int, bool]]) -> None:
    """Of each request: its tokens, and whether its experts were lost with an abort; then the next one says them."""
    answer = PartialAnswer(max_new_tokens=100, experts=AnswerExperts(SPEC, PROMPT))
    assert answer.experts is not None
    expected = np.full((len(PROMPT) + sum(tokens for tokens, _ in requests), 2, TOP_K), -1)
    known, total = 0, len(PROMPT)
    for number, (tokens, is_lost) in enumerate(requests):
        total += tokens
        rows = draw_rows(total - 1 - known, seed=number)
        answer.begin()
        answer.extend(end_of_request(tokens, reason="abort", experts=None if is_lost else text_of(rows)))
        answer.settle()
        if not is_lost:
            expected[known : total - 1] = rows[:, EXPERT_LAYERS]
            known = total - 1
        assert answer.experts.num_rows == known
    np.testing.assert_array_equal(sample_rows(answer), expected)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "needs --enable-return-routed-experts"),
        ("no base64", "is no base64 of int32"),
        (text_of(draw_rows(3, seed=0)), "has 18 numbers; 4 tokens x 3 layers x 2 experts were to come"),
        (text_of(draw_rows(4, seed=0) + 1), "names experts 1 to 8; a layer has 8, from 0"),
    ],
)
def test_experts_that_are_not_those_of_the_tokens_are_refused(experts: str | None, message: str) -> None:
    answer = PartialAnswer(max_new_tokens=4, experts=AnswerExperts(SPEC, PROMPT))
    with pytest.raises(MalformedEventError, match=message):
        answer.extend(end_of_request(2, reason="length", experts=experts))
    assert not answer.output_ids


def test_an_answer_whose_experts_nobody_has_said_has_the_trainer_choose() -> None:
    answer = PartialAnswer(max_new_tokens=4, experts=AnswerExperts(SPEC, PROMPT))
    answer.extend(end_of_request(2, reason="length", experts=text_of(draw_rows(4, seed=0))))
    assert (sample_rows(answer)[:4] >= 0).all()
    answer.experts = None
    assert (sample_rows(answer) == -1).all()


def _answers(model: Path, *, engine_seeds: Sequence[int], turn_tokens: int) -> list[PartialAnswer]:
    answers = sample_in_turns(
        model,
        PROMPT,
        seeds=range(4),
        engine_seeds=engine_seeds,
        turn_tokens=turn_tokens,
        max_new_tokens=12,
        experts=SPEC,
    )
    return asyncio.run(answers)


def test_answers_have_the_same_experts_whatever_the_requests_and_the_servers(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", model_type="qwen3_moe")
    in_one_go = _answers(model, engine_seeds=[1], turn_tokens=12)
    in_turns = _answers(model, engine_seeds=[2, 3], turn_tokens=5)
    for whole, pieces in zip(in_one_go, in_turns, strict=True):
        rows = sample_rows(whole)
        assert whole.output_ids == pieces.output_ids and len(np.unique(rows)) > NUM_EXPERTS // 2
        assert (rows[:-1] >= 0).all() and (rows[-1] == -1).all()
        np.testing.assert_array_equal(np.sort(rows), np.sort(sample_rows(pieces)))
