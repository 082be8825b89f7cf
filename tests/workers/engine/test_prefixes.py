"""What a request shares with another one is not computed again, and changes no answer."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.requests import GenerationRequest, RequestOutput
from corral.workers.engine.sampling import SamplingParams
from tests.workers.engine.tiny_models import save_tiny_model

PROMPT = tuple((7 * index) % 60 for index in range(40))
TAILS = [(), (5,), (5, 9), (11, 3) * 9]
TOLERANCE = 1e-4


def request(
    name: str, *, cut: int = 40, tail: int = 0, seed: int = 1, max_new_tokens: int = 8, **asked: Any
) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, sampling_seed=seed, ignore_eos=True)
    prompt = PROMPT[:cut] + TAILS[tail]
    return GenerationRequest(request_id=name, prompt=prompt, sampling=sampling, **asked)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_model(root / f"v{seed}", model_type="qwen3_moe", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engine(directories: list[Path]) -> Iterator[GenerationEngine]:
    """Few rows, so that requests wait, and rows move and are taken again."""
    yield GenerationEngine(directories[0], max_running_requests=4)


ASKED = st.fixed_dictionaries(
    {
        "cut": st.sampled_from([15, 16, 33, 40]),
        "tail": st.sampled_from(range(len(TAILS))),
        "seed": st.sampled_from([1, 2]),
        "max_new_tokens": st.integers(1, 12),
        "input_logprobs_from": st.sampled_from([None, None, 0, 12, 14]),
        "experts_from": st.sampled_from([None, 0, 15]),
    }
)


def test_requests_that_share_their_beginnings_are_answered_as_if_each_were_alone(
    engine: GenerationEngine, directories: list[Path]
) -> None:
    num_shared = 0

    @cache
    def alone(**asked: Any) -> RequestOutput:
        [output] = GenerationEngine(directories[0]).generate([request("alone", **asked)])
        return output

    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.tuples(ASKED, st.integers(0, 9)), min_size=2, max_size=9))
    def are_equal(schedule: list[tuple[dict[str, Any], int]]) -> None:
        nonlocal num_shared
        outputs: list[RequestOutput] = []
        for number, (asked, steps) in enumerate(schedule):
            engine.add(request(str(number), **asked))
            for _ in range(steps):
                outputs += engine.step()
        while engine.has_work:
            outputs += engine.step()
        for output in outputs:
            expected = alone(**schedule[int(output.request_id)][0])
            assert output.output_ids == expected.output_ids
            assert output.output_logprobs == pytest.approx(expected.output_logprobs, abs=TOLERANCE)
            assert output.input_logprobs[:1] == expected.input_logprobs[:1]
            assert output.input_logprobs[1:] == pytest.approx(expected.input_logprobs[1:], abs=TOLERANCE)
            assert (output.experts is None) is (expected.experts is None)
            if output.experts is not None and expected.experts is not None:
                np.testing.assert_array_equal(np.sort(output.experts), np.sort(expected.experts))
            num_shared += output.cached_tokens

    are_equal()
    assert num_shared > 0


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_what_other_weights_have_computed_is_not_shared(directories: list[Path], mode: Any) -> None:
    engine = GenerationEngine(directories[0])
    [ended] = engine.generate([request("ended")])
    engine.add(request("running", max_new_tokens=300))
    engine.step()
    staged = engine.stage_weights(directories[1])
    engine.pause(mode)
    engine.apply_weights(staged, version="1")
    engine.resume()
    engine.add(request("after", experts_from=0))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs += engine.step()
    [expected] = GenerationEngine(directories[1]).generate([request("alone", experts_from=0)])
    [output] = outputs
    assert output.request_id == "after" and output.cached_tokens == 0
    assert output.output_ids == expected.output_ids != ended.output_ids
    assert output.output_logprobs == pytest.approx(expected.output_logprobs, abs=TOLERANCE)
