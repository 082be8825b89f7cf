"""Tokens that are read a step later are the same tokens: outputs, versions, counters, whatever happens meanwhile.

Two engines get the same schedule, one of which reads each step at once. In double precision, since a row that stays a
step longer changes the shape of products, and so their rounding: in float32 outputs must then be equal bit for bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from corral.experiments.config.rollout import UpdateMode
from corral.workers.engine import engine as engine_module
from corral.workers.engine.engine import GenerationEngine, StagedModel
from corral.workers.engine.requests import AbortFinish, GenerationRequest, LengthFinish, RequestOutput, StopFinish
from corral.workers.engine.sampling import SamplingParams
from corral.workers.episodes.stream_events import NOT_FINITE
from tests.workers.engine.tiny_models import VOCAB_SIZE, add_tokenizer, save_tiny_model

PROMPTS = [(7,), (5, 9, 3, 33), tuple(range(14, 51))]
STOPS = frozenset(range(0, VOCAB_SIZE, 3))
"""A third of all tokens: answers end after three or so, when nobody expects it."""
MODES = list(get_args(UpdateMode))


class Pair:
    """An engine that reads at once and one that reads a step later, with the same weights to change between."""

    def __init__(self, directories: Sequence[Path], *, max_running_requests: int = 64, **options: Any) -> None:
        self.engines = [
            GenerationEngine(
                directories[0], read_lag=lag, max_running_requests=max_running_requests, version="1", **options
            )
            for lag in (0, 1)
        ]
        self._staged = [[engine.stage_weights(directory) for directory in directories] for engine in self.engines]

    def run(self, actions: Sequence[Any]) -> list[dict[str, RequestOutput]]:
        """What either gives for a schedule, from a fresh start to the end of every request."""
        return [self._run(*both, actions) for both in zip(self.engines, self._staged, strict=True)]

    def _run(
        self, engine: GenerationEngine, staged: Sequence[StagedModel], actions: Sequence[Any]
    ) -> dict[str, RequestOutput]:
        engine.abort(None)
        engine.apply_weights(staged[0], version="1")
        outputs: list[RequestOutput] = []
        num_requests, num_updates = 0, 1
        for action in actions:
            if isinstance(action, int):
                for _ in range(action):
                    outputs += engine.step()
            elif isinstance(action, dict):
                engine.add(request(str(num_requests), **action))
                num_requests += 1
            elif action in MODES:
                outputs += engine.pause(action)
            elif action == "abort":
                outputs += engine.abort(frozenset(str(number) for number in range(0, num_requests, 2)))
            elif action == "update":
                num_updates += 1
                engine.apply_weights(staged[num_updates % len(staged)], version=str(num_updates))
            else:
                engine.resume()
        engine.resume()
        while engine.has_work:
            outputs += engine.step()
        by_id = {output.request_id: output for output in outputs}
        assert len(by_id) == len(outputs) == num_requests, "each request ends once"
        return by_id


def _without_counts(outputs: dict[str, RequestOutput]) -> dict[str, RequestOutput]:
    """Whoever gets a row a step later may share more or less of its prompt with others."""
    return {name: replace(output, cached_tokens=0) for name, output in outputs.items()}


def request(
    name: str, *, prompt: int, seed: int | None = 1, experts_from: int | None = None, **sampling: Any
) -> GenerationRequest:
    params = SamplingParams(**{"stop_token_ids": STOPS, "sampling_seed": seed, **sampling})
    return GenerationRequest(
        request_id=name,
        prompt=PROMPTS[prompt],
        sampling=params,
        wants_original_logprobs=True,
        experts_from=experts_from,
    )


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [add_tokenizer(save_tiny_model(root / f"v{seed}", seed=seed)) for seed in range(2)]


@pytest.fixture(scope="module")
def in_double_precision() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_module.DTYPES, "float64", torch.float64)
        yield


@pytest.fixture(scope="module")
def pair(directories: list[Path], in_double_precision: None) -> Pair:
    return Pair(directories, dtype="float64")


@pytest.fixture(scope="module")
def crowded(directories: list[Path], in_double_precision: None) -> Pair:
    """Rows for two requests, while others wait."""
    return Pair(directories, dtype="float64", max_running_requests=2, max_total_tokens=120)


REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(range(len(PROMPTS))),
        "max_new_tokens": st.integers(1, 8),
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "seed": st.sampled_from([None, 1, 2]),
        "stop": st.sampled_from([(), (), ("a", "5")]),
        "ignore_eos": st.booleans(),
    }
)
ACTIONS = st.lists(
    st.one_of(REQUESTS, REQUESTS, st.integers(1, 4), st.sampled_from([*MODES, "abort", "update", "resume"])),
    max_size=12,
)
ANSWER = {"prompt": 0, "max_new_tokens": 12, "temperature": 1.0}


@pytest.mark.parametrize("num_schedules", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_outputs_and_counters_are_those_of_reading_at_once(pair: Pair, num_schedules: int) -> None:
    @settings(max_examples=num_schedules, suppress_health_check=[HealthCheck.too_slow])
    @example([ANSWER, ANSWER | {"ignore_eos": True}, 2, "in_place", "update", "resume", 3, "abort"])
    @example([ANSWER, 3, "update", ANSWER, 2, "retract", "resume", 4])
    @given(ACTIONS)
    def are_equal(actions: list[Any]) -> None:
        before = [engine.tokens_generated for engine in pair.engines]
        at_once, later = (_without_counts(outputs) for outputs in pair.run(actions))
        assert later == at_once
        counted = [engine.tokens_generated - count for engine, count in zip(pair.engines, before, strict=True)]
        assert counted == [sum(len(output.output_ids) for output in at_once.values())] * 2

    are_equal()


@pytest.mark.parametrize("num_schedules", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_requests_that_wait_for_a_row_get_the_same_answers_in_it(crowded: Pair, num_schedules: int) -> None:
    @settings(max_examples=num_schedules, suppress_health_check=[HealthCheck.too_slow])
    @given(requests=st.lists(REQUESTS, min_size=4, max_size=7), wait=st.integers(0, 3))
    def are_equal(requests: list[Any], wait: int) -> None:
        at_once, later = crowded.run([*requests[:3], wait + 1, *requests[3:]])
        assert _without_counts(later) == _without_counts(at_once)

    are_equal()


def test_the_next_step_is_begun_before_a_token_is_read(directories: list[Path]) -> None:
    engine = GenerationEngine(directories[0], read_lag=1)
    engine.add(replace(request("a", prompt=0, max_new_tokens=4, ignore_eos=True), is_streamed=True))
    read = []
    while engine.has_work:
        ended = engine.step()
        read.append(sum(len(output.output_ids) for output in [*ended, *engine.news()]))
    assert read == [1, 1, 1, 1]  # the first step samples two; the last one only reads, since no token can follow
    assert engine.num_running == 0
    [output] = ended
    assert output.finish_reason == LengthFinish(4)


def test_an_engine_that_nobody_asks_holds_nothing_back(directories: list[Path]) -> None:
    """The step that was begun before the last answer's end was known is forgotten with it."""
    engine = GenerationEngine(directories[0], read_lag=1)
    [output] = engine.generate([request("a", prompt=0, max_new_tokens=50, seed=3)])
    assert isinstance(output.finish_reason, StopFinish) and output.output_ids[-1] in STOPS
    assert not engine.has_work and engine.flush_cache() and engine.abort(None) == []
    [again] = engine.generate([request("a", prompt=0, max_new_tokens=50, seed=3)])
    assert again == output


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_reads_what_is_under_way_and_says_who_ended(mode: UpdateMode, directories: list[Path]) -> None:
    engine = GenerationEngine(directories[0], read_lag=1)
    engine.add(request("short", prompt=0, max_new_tokens=3, ignore_eos=True))
    engine.add(request("long", prompt=1, max_new_tokens=9, ignore_eos=True))
    assert engine.step() == engine.step() == []
    outputs = {output.request_id: output for output in engine.pause(mode)}
    assert outputs.pop("short").finish_reason == LengthFinish(3)
    aborted = [(output.finish_reason, len(output.output_ids)) for output in outputs.values()]
    assert aborted == ([(AbortFinish(), 3)] if mode == "abort" else [])


def test_logits_that_are_not_finite_do_not_outlast_their_request(directories: list[Path]) -> None:
    """The step after them is begun before they are seen, in the same row, and the row is given to another."""
    answers = []
    for lag in (0, 1):
        engine = GenerationEngine(directories[0], read_lag=lag)
        poisoned = engine.stage_weights(directories[0])
        poisoned.model.get_parameter("model.embed_tokens.weight")[13] = float("nan")
        engine.apply_weights(poisoned, version="poisoned")
        engine.add(GenerationRequest(request_id="bad", prompt=(*[7] * 30, 13), sampling=SamplingParams()))
        ended = engine.step() + engine.step()
        assert [output.finish_reason for output in ended] == [
            AbortFinish("the model's logits are not finite", err_type=NOT_FINITE)
        ]
        engine.add(request("0", prompt=0, max_new_tokens=6, ignore_eos=True, temperature=0.0))
        ended = engine.step()
        engine.add(request("1", prompt=2, max_new_tokens=6, ignore_eos=True, temperature=0.0))
        while engine.has_work:
            ended += engine.step()
        answers.append([output.output_ids for output in ended])
    assert answers[0] == answers[1] and [len(answer) for answer in answers[0]] == [6, 6]


def test_experts_are_of_the_tokens_of_the_answer_alone(tmp_path: Path, in_double_precision: None) -> None:
    pair = Pair([save_tiny_model(tmp_path / "mixture", model_type="qwen3_moe")], dtype="float64")
    short = ANSWER | {"max_new_tokens": 6}
    asked = [short | {"experts_from": 0}, short | {"prompt": 1, "ignore_eos": True, "experts_from": 2}]
    at_once, later = pair.run([*asked, 3, "retract", "resume", short])
    for one, other in zip(at_once.values(), later.values(), strict=True):
        assert replace(one, experts=None) == replace(other, experts=None)
    for name, first in (("0", 0), ("1", 2)):
        one, other = at_once[name], later[name]
        assert one.experts is not None and other.experts is not None
        assert len(one.experts) == len(one.prompt) + len(one.output_ids) - 1 - first
        np.testing.assert_array_equal(one.experts, other.experts)
