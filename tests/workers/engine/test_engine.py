"""The embedded engine against transformers: same tokens, same log-probabilities, whoever shares the batch."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from corral.experiments.config.rollout import UpdateMode
from corral.workers.engine import batch
from corral.workers.engine.decoder import UnsupportedModelError
from corral.workers.engine.engine import EngineLoop, EngineStoppedError, GenerationEngine
from corral.workers.engine.requests import AbortFinish, GenerationRequest, LengthFinish, RequestOutput, StopFinish
from corral.workers.engine.sampling import SamplingParams
from corral.workers.episodes.stream_events import NOT_FINITE
from tests.workers.engine.tiny_models import (
    add_tokenizer,
    generate_greedily,
    load_reference,
    reference_greedy,
    reference_logprobs,
    save_tiny_model,
    text_of,
)

PROMPTS = [[7], [5, 9, 3, 33], list(range(1, 38)), [index * index % 61 for index in range(70)], [60, 2, 41]]


@pytest.fixture
def engine(directories: list[Path]) -> GenerationEngine:
    return GenerationEngine(directories[0], version="1.0")


def request(name: str, prompt: Sequence[int], **sampling: Any) -> GenerationRequest:
    sampling = {"temperature": 0, "ignore_eos": True, **sampling}
    return GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=SamplingParams(**sampling))


def finish(engine: GenerationEngine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs.update((output.request_id, output) for output in engine.step())
    return outputs


def assert_close(actual: Sequence[float], expected: torch.Tensor, *, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(torch.tensor(list(actual)), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_greedy_tokens_and_logprobs_of_a_ragged_batch_equal_transformers(model_type: str, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model", seed=3, model_type=model_type)
    reference = load_reference(directory)
    outputs = GenerationEngine(directory).generate(
        request(str(index), prompt, max_new_tokens=40) for index, prompt in enumerate(PROMPTS)
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.output_ids) == reference_greedy(reference, prompt, max_new_tokens=40)
        assert_close(output.output_logprobs, reference_logprobs(reference, prompt, output.output_ids))
        assert output.finish_reason == LengthFinish(40)


def test_sequences_that_outgrow_the_cache_again_and_again_stay_exact(
    engine: GenerationEngine, references: list[Any]
) -> None:
    [output] = engine.generate([request("long", [5, 9], max_new_tokens=300)])
    assert_close(output.output_logprobs, reference_logprobs(references[0], [5, 9], output.output_ids))


@pytest.mark.parametrize("call_cost", [None, 1], ids=["attended in one call", "attended in spans"])
def test_requests_that_join_and_leave_do_not_change_the_others(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch, call_cost: int | None
) -> None:
    monkeypatch.setattr(batch, "call_cost", lambda cache: call_cost)
    requests = [
        request(str(index), prompt, temperature=temperature, sampling_seed=index, max_new_tokens=12 + 9 * index)
        for index, (prompt, temperature) in enumerate(zip(PROMPTS, [0, 1.0, 0.8, 0, 1.2], strict=True))
    ]
    alone = [GenerationEngine(directories[0]).generate([single])[0] for single in requests]
    engine = GenerationEngine(directories[0])
    outputs: dict[str, RequestOutput] = {}
    engine.add(request("leaver", [1, 2, 3], max_new_tokens=500))
    for late in requests:
        engine.add(late)
        for _ in range(5):
            outputs.update((output.request_id, output) for output in engine.step())
        if late.request_id == "2":
            engine.abort(frozenset({"leaver"}))
    outputs.update(finish(engine))
    for single, output in zip(alone, (outputs[single.request_id] for single in alone), strict=True):
        assert output.output_ids == single.output_ids
        assert_close(output.output_logprobs, torch.tensor(single.output_logprobs))


def test_more_requests_than_rows_or_cache_queue_and_all_finish(directories: list[Path], references: list[Any]) -> None:
    engine = GenerationEngine(directories[0], max_running_requests=3, max_total_tokens=200)
    outputs = engine.generate(
        request(f"{round_}{index}", prompt, max_new_tokens=20)
        for round_ in range(2)
        for index, prompt in enumerate(PROMPTS)
    )
    for prompt, output in zip(PROMPTS * 2, outputs, strict=True):
        assert list(output.output_ids) == reference_greedy(references[0], prompt, max_new_tokens=20)


def test_answers_to_one_prompt_share_its_prefill_and_differ(engine: GenerationEngine, references: list[Any]) -> None:
    prompt = PROMPTS[2]
    outputs = engine.generate(request(str(index), prompt, temperature=1.0, max_new_tokens=25) for index in range(6))
    assert [output.cached_tokens for output in outputs] == [0] + [len(prompt)] * 5
    assert len({output.output_ids for output in outputs}) == 6
    for output in outputs:
        assert_close(output.output_logprobs, reference_logprobs(references[0], prompt, output.output_ids))


SEEDED: dict[str, Any] = {"temperature": 1.0, "sampling_seed": 11}


@pytest.fixture(scope="module")
def seeded_answer(directories: list[Path]) -> tuple[int, ...]:
    """What one request makes of SEEDED in 40 tokens."""
    engine = GenerationEngine(directories[0], seed=1)
    return engine.generate([request("a", PROMPTS[1], max_new_tokens=40, **SEEDED)])[0].output_ids


@pytest.mark.parametrize("chunk", [1, 3, 17, 39])
def test_an_answer_is_the_same_in_chunks_of_any_size_among_any_others_and_on_any_engine(
    directories: list[Path], seeded_answer: tuple[int, ...], chunk: int
) -> None:
    answer: tuple[int, ...] = ()
    while len(answer) < 40:
        engine = GenerationEngine(directories[0], seed=100 + len(answer))
        others = [request(f"other {index}", prompt, max_new_tokens=5) for index, prompt in enumerate(PROMPTS)]
        asked = request("a", [*PROMPTS[1], *answer], max_new_tokens=min(chunk, 40 - len(answer)), **SEEDED)
        answer += engine.generate([*others, asked])[-1].output_ids
    assert answer == seeded_answer


def test_an_answer_is_the_same_after_retractions(engine: GenerationEngine, seeded_answer: tuple[int, ...]) -> None:
    engine.add(request("a", PROMPTS[1], max_new_tokens=40, **SEEDED))
    for num_steps in (1, 7, 12):
        for _ in range(num_steps):
            engine.step()
        engine.pause("retract")
        engine.resume()
    output = finish(engine)["a"]
    assert (output.output_ids, output.num_retractions) == (seeded_answer, 3)


def test_requests_without_a_seed_differ_and_an_engine_that_starts_again_repeats_them(directories: list[Path]) -> None:
    def answers(num_seeded: int) -> list[tuple[int, ...]]:
        engine = GenerationEngine(directories[0], seed=5)
        engine.generate(request(f"s{index}", [4, 5], max_new_tokens=1, **SEEDED) for index in range(num_seeded))
        outputs = engine.generate(request(str(i), [4, 5], temperature=1.0, max_new_tokens=30) for i in range(4))
        return [output.output_ids for output in outputs]

    assert len(set(answers(0))) == 4
    assert answers(0) == answers(0) == answers(2)


def test_generation_ends_with_the_token_that_completes_a_stop_string(tmp_path: Path) -> None:
    engine = GenerationEngine(add_tokenizer(save_tiny_model(tmp_path)))
    [whole] = engine.generate([request("whole", [7], max_new_tokens=60, temperature=1.0, sampling_seed=3)])
    stop = text_of(whole.output_ids[20:23])
    end = text_of(whole.output_ids).index(stop) + len(stop)
    [output] = engine.generate(
        [request("stop", [7], max_new_tokens=60, temperature=1.0, sampling_seed=3, stop=("nowhere", stop))]
    )
    assert (output.output_ids, output.finish_reason) == (whole.output_ids[:end], StopFinish(stop))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot use the tokenizer"):
        GenerationEngine(tmp_path).add(request("torn", [7], stop=("a",)))


def test_stop_strings_are_refused_where_there_is_no_tokenizer(engine: GenerationEngine) -> None:
    with pytest.raises(ValueError, match=r"stop=\['a'\] needs the text of the answer, .* no tokenizer.json"):
        engine.add(request("text", [7], stop=("a",)))


def test_a_request_larger_than_the_cache_is_refused(directories: list[Path]) -> None:
    engine = GenerationEngine(directories[0], max_total_tokens=100)
    with pytest.raises(ValueError, match="more than max_total_tokens of 100"):
        engine.add(request("big", [1] * 50, max_new_tokens=51))


def test_abort_returns_the_tokens_made_so_far(engine: GenerationEngine, references: list[Any]) -> None:
    engine.add(request("a", [7], max_new_tokens=50))
    engine.add(request("b", [5, 9], max_new_tokens=9))
    for _ in range(4):
        engine.step()
    engine.add(request("queued", [5], max_new_tokens=50))
    outputs = {output.request_id: output for output in engine.abort(frozenset({"a", "queued", "unknown"}))}
    assert outputs["a"].finish_reason == outputs["queued"].finish_reason == AbortFinish()
    assert list(outputs["a"].output_ids) == reference_greedy(references[0], [7], max_new_tokens=5)
    assert outputs["queued"].output_ids == ()
    assert list(finish(engine)["b"].output_ids) == reference_greedy(references[0], [5, 9], max_new_tokens=9)


def test_the_cache_is_flushed_only_when_no_running_request_needs_it(engine: GenerationEngine) -> None:
    engine.add(request("a", [7], max_new_tokens=30))
    engine.step()
    assert not engine.flush_cache()
    engine.pause("in_place")
    assert not engine.flush_cache()
    engine.pause("retract")
    assert engine.flush_cache()
    engine.resume()
    assert len(finish(engine)["a"].output_ids) == 30


def test_a_request_whose_logits_are_not_finite_is_ended_and_the_engine_lives(
    directories: list[Path], references: list[Any]
) -> None:
    engine = GenerationEngine(directories[0])
    staged = engine.stage_weights(directories[0])
    staged.model.get_parameter("model.embed_tokens.weight")[13] = float("nan")
    engine.apply_weights(staged, version="poisoned")
    [bad] = engine.generate([request("bad", [*[7] * 30, 13], temperature=1.0, max_new_tokens=5)])
    assert bad.finish_reason == AbortFinish("the model's logits are not finite", err_type=NOT_FINITE)
    assert bad.output_ids == ()
    # The first takes over the cache row; what lies beyond its own length is read, masked, once the longer second joins.
    prompts = [[7], [5] * 40]
    for index, prompt in enumerate(prompts):
        engine.add(request(str(index), prompt, max_new_tokens=6))
        engine.step()
    outputs = finish(engine)
    for index, prompt in enumerate(prompts):
        assert list(outputs[str(index)].output_ids) == reference_greedy(references[0], prompt, max_new_tokens=6)


def test_greedy_generation_with_a_loaded_module_equals_transformers(references: list[Any]) -> None:
    module = references[0]
    module.train()
    try:
        outputs = generate_greedily(module, PROMPTS * 15, max_new_tokens=10)
        assert module.training
    finally:
        module.eval()
    expected = [reference_greedy(module, prompt, max_new_tokens=10) for prompt in PROMPTS]
    assert outputs == expected * 15
    stop = expected[0][4]
    [stopped] = generate_greedily(module, PROMPTS[:1], max_new_tokens=10, stop_token_ids=[stop])
    assert stopped == expected[0][: expected[0].index(stop) + 1]
    assert generate_greedily(module, [], max_new_tokens=10) == []


def test_a_model_that_would_be_computed_wrongly_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, Qwen2Config

    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match="llama, qwen2, qwen3, qwen3_moe, not 'gpt2'"):
        GenerationEngine(tmp_path / "gpt2")
    Qwen2Config(use_sliding_window=True, sliding_window=16, max_window_layers=0).save_pretrained(tmp_path / "sliding")
    with pytest.raises(UnsupportedModelError, match="full attention only"):
        GenerationEngine(tmp_path / "sliding")


def test_pickled_weights_are_not_loaded(directories: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((directories[0] / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="model.safetensors"):
        GenerationEngine(tmp_path)


# --- the engine's thread --------------------------------------------------------------------------------------------

DEADLINE_S = 120.0


@pytest.fixture
def loop(directories: list[Path]) -> Iterator[EngineLoop]:
    with EngineLoop(GenerationEngine(directories[0], version="1.0")) as loop:
        yield loop


def looped_request(name: str, *, max_new_tokens: int = 200) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt=(7, 8), sampling=sampling)


def versions(output: RequestOutput) -> list[str]:
    return [span.version for span in output.weight_versions]


def start_running(loop: EngineLoop, name: str) -> Future[RequestOutput]:
    """A long request that has made a token."""
    has_begun = threading.Event()
    asked = replace(looped_request(name, max_new_tokens=4000), is_streamed=True)
    future = loop.submit(asked, listener=lambda output: has_begun.set())
    assert has_begun.wait(DEADLINE_S)
    return future


@pytest.mark.parametrize("mode", list(get_args(UpdateMode)))
def test_a_change_over_is_checked_before_the_new_weights_make_a_token(
    loop: EngineLoop, directories: list[Path], mode: UpdateMode
) -> None:
    running = start_running(loop, "running")
    steps: list[int] = []

    def check() -> None:
        steps.append(loop.engine.steps)
        assert loop.engine.version == "1.1" and loop.engine.is_paused

    staged = loop.engine.stage_weights(directories[1])
    done = loop.change_over(staged, version="1.1", mode=mode, check=check).result(DEADLINE_S)
    assert done.stopped_s > 0.0
    assert done.replaced.directory == directories[0]
    after = loop.submit(looped_request("after", max_new_tokens=2)).result(DEADLINE_S)
    assert versions(after) == ["1.1"] and loop.engine.steps > steps[0] and len(steps) == 1
    loop.abort(None).result(DEADLINE_S)
    assert versions(running.result(DEADLINE_S)) == (["1.0"] if mode == "abort" else ["1.0", "1.1"])


def test_a_change_over_that_is_refused_ends_requests_and_no_token_is_made_until_the_next_one(
    loop: EngineLoop, directories: list[Path]
) -> None:
    running = start_running(loop, "running")

    def check() -> None:
        raise RuntimeError("these are other weights")

    staged = loop.engine.stage_weights(directories[1])
    done = loop.change_over(staged, version="1.1", mode="retract", check=check)
    with pytest.raises(RuntimeError, match="these are other weights"):
        done.result(DEADLINE_S)
    ended = running.result(DEADLINE_S)
    assert ended.finish_reason == AbortFinish() and versions(ended) == ["1.0"]
    after, steps = loop.submit(looped_request("after", max_new_tokens=2)), loop.engine.steps
    assert loop.engine.is_paused
    staged = loop.engine.stage_weights(directories[0])
    loop.change_over(staged, version="1.2", mode="retract", check=lambda: None).result(DEADLINE_S)
    assert versions(after.result(DEADLINE_S)) == ["1.2"] and loop.engine.steps > steps


def test_a_request_id_in_flight_is_not_taken_twice_but_may_come_again(loop: EngineLoop) -> None:
    first = loop.submit(looped_request("a"))
    with pytest.raises(ValueError, match="request id 'a' is already in flight"):
        loop.submit(looped_request("a")).result(DEADLINE_S)
    assert len(first.result(DEADLINE_S).output_ids) == 200
    assert len(loop.submit(looped_request("a")).result(DEADLINE_S).output_ids) == 200


def test_stopping_ends_running_and_queued_requests_as_aborted_and_refuses_new_ones(
    directories: list[Path],
) -> None:
    with EngineLoop(GenerationEngine(directories[0])) as loop:
        running = start_running(loop, "running")
        loop.call(partial(loop.engine.pause, "in_place")).result(DEADLINE_S)
        queued = loop.submit(looped_request("queued"))
    assert running.result(0).finish_reason == queued.result(0).finish_reason == AbortFinish()
    with pytest.raises(EngineStoppedError, match="has stopped"):
        loop.submit(looped_request("late")).result(0)
    assert loop.ended.result(0) is None
