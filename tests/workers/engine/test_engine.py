"""The embedded engine against transformers: same tokens, same log-probabilities, whoever shares the batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from corral.experiments.config.rollout import UpdateMode
from corral.workers.engine import batch
from corral.workers.engine.decoder import UnsupportedModelError
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.requests import (
    AbortFinish,
    GenerationRequest,
    LengthFinish,
    RequestOutput,
    StopFinish,
    VersionSpan,
)
from corral.workers.engine.sampling import SamplingParams
from corral.workers.episodes.stream_events import NOT_FINITE
from tests.workers.engine.tiny_models import (
    CONTEXT_LENGTH,
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    add_tokenizer,
    generate_greedily,
    load_reference,
    reference_greedy,
    reference_logprobs,
    reference_logprobs_over_cache,
    save_tiny_model,
    text_of,
)

PROMPTS = [[7], [5, 9, 3, 33], list(range(1, 38)), [index * index % 61 for index in range(70)], [60, 2, 41]]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of the same tiny Qwen2."""
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_model(root / f"v{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def references(directories: list[Path]) -> list[Any]:
    return [load_reference(directory) for directory in directories]


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


def test_logprobs_are_of_the_untruncated_distribution_at_the_sampling_temperature(
    engine: GenerationEngine, references: list[Any]
) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_new_tokens": 30}
    outputs = engine.generate(request(str(index), prompt, **sampling) for index, prompt in enumerate(PROMPTS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference_logprobs(references[0], prompt, output.output_ids, temperature=0.7)
        assert_close(output.output_logprobs, expected)


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


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(directories: list[Path]) -> None:
    def sample(engine_seed: int, sampling_seed: int | None) -> tuple[int, ...]:
        engine = GenerationEngine(directories[0], seed=engine_seed)
        wanted = request("a", [4, 5], temperature=1.0, max_new_tokens=30, sampling_seed=sampling_seed)
        return engine.generate([wanted])[0].output_ids

    assert sample(1, None) == sample(1, None) != sample(2, None)
    assert sample(1, 9) == sample(2, 9)


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


def test_generation_ends_after_a_stop_token_or_the_models_end_of_sequence(
    engine: GenerationEngine, references: list[Any]
) -> None:
    greedy = reference_greedy(references[0], [7], max_new_tokens=60)
    stop = {"stop_token_ids": frozenset({greedy[10]}), "max_new_tokens": 60}
    length = greedy.index(greedy[10]) + 1
    [output] = engine.generate([request("stop", [7], ignore_eos=False, **stop)])
    assert list(output.output_ids) == greedy[:length]
    assert output.finish_reason == StopFinish(greedy[10])
    [ignored] = engine.generate([request("ignored", [7], **stop)])
    assert list(ignored.output_ids) == greedy

    sampling = {"temperature": 5.0, "max_new_tokens": 3000, "sampling_seed": 1}
    [ended] = engine.generate([request("eos", [7], **sampling, ignore_eos=False)])
    assert ended.finish_reason == StopFinish(EOS_TOKEN_ID)
    assert EOS_TOKEN_ID not in ended.output_ids[:-1]
    [ignored] = engine.generate([request("ignored", [7], **sampling | {"max_new_tokens": len(ended.output_ids) + 5})])
    assert ignored.output_ids[: len(ended.output_ids)] == ended.output_ids
    assert ignored.finish_reason == LengthFinish(len(ended.output_ids) + 5)


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


def test_input_logprobs_are_those_of_the_prompt_at_temperature_one(
    engine: GenerationEngine, references: list[Any]
) -> None:
    prompt = PROMPTS[2]
    wanted = GenerationRequest(
        request_id="a",
        prompt=tuple(prompt),
        sampling=SamplingParams(max_new_tokens=2, temperature=0.5),
        input_logprobs_from=4,
    )
    [output] = engine.generate([wanted])
    assert output.input_logprobs[0] is None
    scored = [value for value in output.input_logprobs if value is not None]
    assert_close(scored, reference_logprobs(references[0], prompt[:5], prompt[5:]))


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 1, "prompt is empty"),
        ([3, VOCAB_SIZE], 1, r"token id 64 at position 1 .* \[0, 64\)"),
        ([3, -1], 1, r"token id -1 at position 1"),
        (
            [3] * 10,
            CONTEXT_LENGTH,
            r"10 tokens with max_new_tokens=4096 may reach 4106 tokens, .*context length of 4096",
        ),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_the_value_and_the_limit(
    engine: GenerationEngine, prompt: list[int], max_new_tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add(request("bad", prompt, max_new_tokens=max_new_tokens))
    assert not engine.has_work


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


def run_across_an_update(engine: GenerationEngine, mode: UpdateMode, new_weights: Path) -> dict[str, RequestOutput]:
    """Three sampled requests, paused after eight steps, updated to 1.1 and continued."""
    for index, prompt in enumerate(PROMPTS[:3]):
        engine.add(request(str(index), prompt, temperature=1.0, max_new_tokens=20 + index))
    for _ in range(8):
        engine.step()
    outputs = {output.request_id: output for output in engine.pause(mode)}
    assert engine.step() == []
    engine.apply_weights(engine.stage_weights(new_weights), version="1.1")
    engine.resume()
    return outputs | finish(engine)


def test_retracted_requests_continue_under_the_new_weights_over_their_whole_prefix(
    engine: GenerationEngine, directories: list[Path], references: list[Any]
) -> None:
    outputs = run_across_an_update(engine, "retract", directories[1])
    for index, prompt in enumerate(PROMPTS[:3]):
        output = outputs[str(index)]
        old, new = output.weight_versions
        assert (old, new) == (VersionSpan("1.0", 0, 9), VersionSpan("1.1", 9, 20 + index))
        assert output.num_retractions == 1
        by_old, by_new = (reference_logprobs(reference, prompt, output.output_ids) for reference in references)
        assert_close(output.output_logprobs[:9], by_old[:9], tolerance=1e-3)
        assert_close(output.output_logprobs[9:], by_new[9:], tolerance=1e-3)
        # The two models disagree, so a token counted to the wrong version would have been seen.
        assert (by_old[9:] - by_new[9:]).abs().max() > 0.1


def test_in_place_requests_continue_over_the_old_keys_and_values(
    engine: GenerationEngine, directories: list[Path], references: list[Any]
) -> None:
    outputs = run_across_an_update(engine, "in_place", directories[1])
    for index, prompt in enumerate(PROMPTS[:3]):
        output = outputs[str(index)]
        assert output.weight_versions == (VersionSpan("1.0", 0, 9), VersionSpan("1.1", 9, 20 + index))
        assert output.num_retractions == 0
        # The ninth token was sampled by the old weights, but enters the cache by the new ones.
        mixed = reference_logprobs_over_cache(
            references[0], references[1], prompt, output.output_ids, num_cached=len(prompt) + 8
        )
        assert_close(output.output_logprobs[9:], mixed, tolerance=1e-3)


def test_aborted_requests_end_with_their_tokens_of_the_old_version(
    engine: GenerationEngine, directories: list[Path], references: list[Any]
) -> None:
    outputs = run_across_an_update(engine, "abort", directories[1])
    for index, prompt in enumerate(PROMPTS[:3]):
        output = outputs[str(index)]
        assert output.finish_reason == AbortFinish()
        assert output.weight_versions == (VersionSpan("1.0", 0, 9),)
        assert_close(output.output_logprobs, reference_logprobs(references[0], prompt, output.output_ids))


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
