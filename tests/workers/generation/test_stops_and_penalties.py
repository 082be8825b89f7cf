"""What SGLang does only with a tokenizer, or only without its overlap schedule, is what the embedded engine does.

A trial always starts SGLang without the one, and with the other by default; here its flags say otherwise.
"""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral.experiments.config.endpoint import TeacherEndpointConfig
from corral.workers.data.sequence_sample import answer_slices
from corral.workers.generation.embedded import EmbeddedBackend
from corral.workers.rollout.served_teachers import ServedTeachers
from tests.workers.backends.training_helpers import make_sample
from tests.workers.engine.tiny_models import (
    add_tokenizer,
    load_reference,
    reference_greedy,
    reference_logits,
    save_tiny_model,
    text_of,
)
from tests.workers.generation.servers import Served, serving
from tests.workers.rewards.scripted_endpoint import Endpoint

pytestmark = pytest.mark.slow  # the start of SGLang is half a minute of computing
PROMPTS = [[7, 31, 15, 8], [(3 * index) % 60 for index in range(37)]]
FLAGS = {"skip-tokenizer-init": False, "disable-overlap-schedule": True}
GREEDY = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(save_tiny_model(tmp_path_factory.mktemp("model") / "v0"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


@pytest.fixture(scope="module", params=["hf", "sglang"])
def served(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(request.param, model, tmp_path_factory.mktemp("server"), flags=FLAGS) as served:
        yield served


def logprobs_of(answer: Any) -> list[float]:
    return [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]


def test_an_answer_ends_with_the_token_that_completes_a_stop_string(served: Served, reference: Any) -> None:
    for prompt in PROMPTS:
        whole = reference_greedy(reference, prompt, max_new_tokens=40)
        stop = text_of(whole[20:23])
        end = text_of(whole).index(stop) + len(stop)
        for wanted in (stop, ["nowhere", stop]):
            answer = served.client.generate(prompt, **GREEDY, stop=wanted)
            assert answer["output_ids"] == whole[:end]
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            assert answer["text"] == text_of(whole).partition(stop)[0]
            kept = served.client.generate(prompt, **GREEDY, stop=wanted, no_stop_trim=True)
            assert kept["text"] == text_of(whole[:end])


def test_the_text_of_an_answer_is_without_what_has_stopped_it(served: Served, reference: Any) -> None:
    for prompt in PROMPTS:
        whole = reference_greedy(reference, prompt, max_new_tokens=40)
        assert served.client.generate(prompt, **GREEDY)["text"] == text_of(whole)
        assert served.client.stream(prompt, **GREEDY)[-1]["text"] == text_of(whole)
        token = next(token for token in whole[3:] if token not in whole[:3])
        stopped = {**GREEDY, "ignore_eos": False, "stop_token_ids": [token]}
        end = whole.index(token)
        assert served.client.generate(prompt, **stopped)["text"] == text_of(whole[:end])
        assert served.client.generate(prompt, **stopped, no_stop_trim=True)["text"] == text_of(whole[: end + 1])


def test_min_p_leaves_out_what_is_rare_and_the_logprobs_as_they_are(served: Served, reference: Any) -> None:
    answer = served.client.generate(PROMPTS[1], max_new_tokens=400, temperature=1.5, min_p=0.2, ignore_eos=True)
    logits = reference_logits(reference, PROMPTS[1], answer["output_ids"]) / 1.5
    logprobs = torch.log_softmax(logits, dim=-1)
    drawn = torch.tensor(logprobs_of(answer))
    assert (drawn >= logprobs.max(dim=-1).values + math.log(0.2) - 1e-4).all()
    chosen = torch.tensor(answer["output_ids"]).unsqueeze(-1)
    torch.testing.assert_close(drawn, logprobs.gather(-1, chosen).squeeze(-1), atol=1e-4, rtol=0)
    assert (drawn < logprobs.max(dim=-1).values - 1e-4).any()


def test_a_teacher_behind_it_says_of_given_tokens_what_its_model_says(
    model: Path, served: Served, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(served.backend, EmbeddedBackend):
        pytest.skip("speaks no /v1/completions")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    endpoint = Endpoint()  # by plain HTTP, as a teacher of anybody's is asked
    endpoint.answers = [(200, lambda body: served.client.call("POST", "/v1/completions", body)[1], {})]
    config = TeacherEndpointConfig(url=endpoint.url, model=str(model), tries=1)
    sample, prompt = make_sample([[30, 12, 5]]), [7, 31, 15, 8]
    judging = ServedTeachers({"": config}, show_wait=str).judge(sample, source="", prompt_ids=prompt)
    try:
        found = asyncio.run(judging)[0].data["teacher_logprobs"]
    finally:
        endpoint.close()
    expected = list[float]()
    for place in answer_slices(sample.answer_lengths()):
        answer = sample.data["input_ids"][place].tolist()[2:]
        table = torch.log_softmax(reference_logits(reference, prompt, answer), -1)
        expected += [0.0, *table.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()]
    np.testing.assert_allclose(found, expected, atol=1e-4)
