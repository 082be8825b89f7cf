"""Teachers outside of the trial, beside a real HTTP server that computes with transformers, and one that fails."""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral.experiments.config.endpoint import TeacherEndpointConfig
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from corral.workers.lifecycle.worker import PromptsFailError
from corral.workers.rewards import endpoint as endpoint_module
from corral.workers.rewards.endpoint import EndpointDownError
from corral.workers.rollout.served_teachers import ServedTeachers, TeacherFailedError
from tests.workers.backends.training_helpers import load_reference, make_sample, save_tiny_model
from tests.workers.data.tiny_tokenizer import EOS, ids_of
from tests.workers.rewards.scripted_endpoint import Endpoint
from tests.workers.rollout.rollout_rig import RolloutRig

KEY = "sk-a-very-secret-key"
HINT = [9, 8, 7, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_reference(save_tiny_model(tmp_path_factory.mktemp("teacher"))).double()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, model: Any) -> Iterator[Endpoint]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("TEACHER_KEY", KEY)
    monkeypatch.setattr(endpoint_module, "_LONGEST_PAUSE_S", 0.01)
    opened = Endpoint()
    opened.answers = [(200, lambda body: completion(model, body), {})]
    yield opened
    opened.close()


def logprobs(model: Any, ids: Sequence[int]) -> list[float]:
    """Of all tokens but the first, at temperature 1."""
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([list(ids)])).logits[0], -1)
    return [float(table[at, token]) for at, token in enumerate(ids[1:])]


def completion(model: Any, body: dict[str, Any]) -> dict[str, Any]:
    """As SGLang and vLLM answer, in an order that is none."""
    assert (body["max_tokens"], body["echo"], body["logprobs"]) == (1, True, 1)
    told = [[None, *logprobs(model, ids), -1.0] for ids in body["prompt"]]  # with a token that it has made
    choices = [{"index": at, "text": "", "logprobs": {"token_logprobs": one}} for at, one in enumerate(told)]
    return {"id": "1", "choices": choices[::-1], "usage": {}}


def teachers(endpoint: Endpoint, *sources: str, waits: list[str] | None = None, **settings: Any) -> ServedTeachers:
    config = TeacherEndpointConfig(url=endpoint.url, model="large", key="$TEACHER_KEY", **settings)
    return ServedTeachers(
        {source: config for source in sources or ("",)}, show_wait=[].append if waits is None else waits.append
    )


def judged(taught: ServedTeachers, sample: SequenceSample, *, source: str = "", prompt: Sequence[int] = ()) -> Any:
    return asyncio.run(taught.judge(sample, source=source, prompt_ids=prompt))[0].data


@pytest.mark.parametrize("hint", [[], HINT])
def test_a_teacher_says_of_made_tokens_what_its_model_says(endpoint: Endpoint, model: Any, hint: list[int]) -> None:
    sample = make_sample([[6, 9, 3]])
    if not hint:  # of several turns: a tool has spoken in the longest
        sample.data["prompt_mask"][6 + 4 : 6 + 6] = True
    found = judged(teachers(endpoint), sample, prompt=hint)["teacher_logprobs"]
    expected = []
    for place in answer_slices(sample.answer_lengths()):
        ids, is_given = sample.data["input_ids"][place].tolist(), sample.data["prompt_mask"][place]
        told = logprobs(model, [*(hint or ids[:2]), *ids[2:]])[-len(ids[2:]) :]
        expected += [0.0, *np.where(is_given[2:], 0.0, told)]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    (request,) = endpoint.asked
    assert (request["path"], request["model"], endpoint.keys) == ("/v1/completions", "large", [f"Bearer {KEY}"])


def test_each_source_has_its_teacher_and_nobody_else_is_asked(endpoint: Endpoint) -> None:
    found = judged(teachers(endpoint, "math", "code"), make_sample([[6, 9]]), source="code")
    assert not found["teacher_logprobs_math"].any() and found["teacher_logprobs_code"].any()
    assert len(endpoint.asked) == 1


def short(body: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": at, "logprobs": {"token_logprobs": [None, -1.0]}} for at in range(2)]}


def unsaid(body: dict[str, Any]) -> dict[str, Any]:
    told = [[None, *[None] * len(ids)] for ids in body["prompt"]]
    return {"choices": [{"index": at, "logprobs": {"token_logprobs": one}} for at, one in enumerate(told)]}


def not_a_number(body: dict[str, Any]) -> dict[str, Any]:
    told = [[float("nan")] * len(ids) for ids in body["prompt"]]
    return {"choices": [{"index": at, "logprobs": {"token_logprobs": one}} for at, one in enumerate(told)]}


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ((200, short, {}), r"says \[2, 2\] log-probabilities, and was asked for \[7, 10\]"),
        ((200, unsaid, {}), "no finite number"),
        ((200, not_a_number, {}), "JSON is malformed"),
        ((200, "a chat", {}), "missing required field `logprobs`"),
        ((404, f"no model, {KEY}", {}), r"refuses the request, status 404: no model, \*\*\*"),
    ],
)
def test_one_that_says_something_else_is_named_with_what_it_said(endpoint: Endpoint, answer: Any, cause: str) -> None:
    endpoint.answers = [answer]
    with pytest.raises(TeacherFailedError, match=cause) as failure:
        judged(teachers(endpoint), make_sample([[6, 9]]))
    assert endpoint.url in str(failure.value) and KEY not in str(failure.value)
    assert len(endpoint.asked) == 1


def test_one_that_is_busy_or_late_is_waited_for_by_its_name_and_in_the_end_given_up(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    said = endpoint.answers[0]
    endpoint.answers, waits = [(503, "loading", {}), (429, "full", {}), said], list[str]()
    with caplog.at_level(logging.WARNING):
        assert judged(teachers(endpoint, waits=waits), make_sample([[6, 9]]))["teacher_logprobs"].any()
    assert waits == [f"the teacher at {endpoint.url}"] * 2 + [""]
    assert [record.message for record in caplog.records] == [
        f"the teacher at {endpoint.url} does not answer, and is asked again: _BusyError: status 503"
    ]
    endpoint.delay_s = 1.0
    with pytest.raises(EndpointDownError, match=f"{endpoint.url} failed 2 times, last: .*Timeout"):
        judged(teachers(endpoint, tries=2, request_timeout_s=0.1), make_sample([[6, 9]]))


def rig(endpoint: Endpoint, folder: Path, *, tries: int = 64, **settings: Any) -> RolloutRig:
    teacher = {"url": endpoint.url, "model": "large", "key": "$TEACHER_KEY", "tries": tries}
    rollout = {"teacher": teacher, "max_concurrent_rollouts": 1}
    return RolloutRig(folder, ["1+2=", "2+2="], rollout=rollout, **settings)


def test_a_rollout_worker_sends_what_its_teacher_says_behind_a_prompt_of_its_own(
    endpoint: Endpoint, model: Any, tmp_path: Path
) -> None:
    told = {"columns": {"teacher_prompt": "told"}}
    fields = [{"told": "3=1+2="}, {}]
    with rig(endpoint, tmp_path, fields=fields, dataset=told, teacher_prompt_tokens=8) as running:
        running.run_until(lambda: len(running.received) == 2, "two prompts")
    for tensors, prompt, own in zip(running.tensors, ("1+2=", "2+2="), ("3=1+2=", "2+2="), strict=True):
        answer = [*ids_of("7"), EOS]
        expected = [*[0.0] * (len(ids_of(prompt)) - 1), *logprobs(model, [*ids_of(own), *answer])[-2:]]
        np.testing.assert_allclose(tensors["teacher_logprobs"], expected * 2, atol=1e-5)
        (kept, _) = tensors["teacher_prompt"].reshape(2, 8).tolist()
        assert kept == [*ids_of(own), -1, -1, -1, -1][:8], "for teachers in the trial"
    assert all(header.scalars["teacher/seconds"] > 0.0 for header in running.received)
    assert KEY not in json.dumps(running.plan.model_dump(mode="json"))


def test_a_prompt_is_dropped_where_its_teacher_talks_rubbish_and_none_where_it_is_down(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.answers = [(200, short, {}), endpoint.answers[0]]
    with rig(endpoint, tmp_path / "rubbish") as running:
        running.run_until(lambda: len(running.received) == 2, "two prompts")
    reason, status = running.outcomes()["0"], running.outcomes()["1"]
    assert reason.startswith(f"teacher_error: {endpoint.url} says [2, 2] log-prob") and status == "finished"
    endpoint.close()
    with rig(endpoint, tmp_path / "down", tries=2) as running:
        with pytest.raises(BaseExceptionGroup) as failure:
            running.run_until(lambda: False, "the end of the worker")
        assert failure.group_contains(PromptsFailError, match=f"{endpoint.url} failed 2 times")
    assert running.received == []
