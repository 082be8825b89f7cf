"""The embedded engine on the device says what transformers says on the CPU, and takes new weights over in place."""

from pathlib import Path

import pytest
import torch

from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.requests import GenerationRequest, RequestOutput
from corral.workers.engine.sampling import SamplingParams
from tests.workers.engine.tiny_models import load_reference, reference_greedy, save_tiny_model

pytestmark = pytest.mark.gpu
PROMPTS = [(5, 9, 3), (7,), (11, 12, 13, 14, 15, 16, 17)]
NEW_TOKENS = 12


def generate(engine: GenerationEngine, *, temperature: float = 0.0) -> list[list[int]]:
    return [list(output.output_ids) for output in outputs_of(engine, temperature=temperature)]


def outputs_of(engine: GenerationEngine, *, temperature: float) -> list[RequestOutput]:
    sampling = SamplingParams(temperature=temperature, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [
        GenerationRequest(request_id=str(number), prompt=prompt, sampling=sampling)
        for number, prompt in enumerate(PROMPTS)
    ]
    return engine.generate(requests)


def greedy_on_the_cpu(directory: Path) -> list[list[int]]:
    model = load_reference(directory)
    return [reference_greedy(model, prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_greedy_answers_are_those_of_transformers_on_the_cpu(model_type: str, device: str, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / model_type, model_type=model_type)
    engine = GenerationEngine(directory, device=device)
    assert generate(engine) == greedy_on_the_cpu(directory)


def test_new_weights_are_staged_on_the_device_and_change_the_answers(device: str, tmp_path: Path) -> None:
    old, new = (save_tiny_model(tmp_path / str(seed), seed=seed) for seed in range(2))
    engine = GenerationEngine(old, device=device, version="old")
    before = generate(engine)
    staged = engine.stage_weights(new)
    assert {parameter.device.type for parameter in staged.model.parameters()} == {device}
    assert generate(engine) == before
    engine.apply_weights(staged, version="new")
    assert generate(engine) == greedy_on_the_cpu(new) != before


def test_what_a_device_samples_it_samples_again(device: str, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model")
    first, again = (generate(GenerationEngine(directory, device=device), temperature=1.0) for _ in range(2))
    assert first == again


def test_bfloat16_weights_stay_bfloat16_on_the_device(device: str, tmp_path: Path) -> None:
    engine = GenerationEngine(save_tiny_model(tmp_path / "model"), device=device, dtype="bfloat16")
    answers = generate(engine)
    assert all(len(answer) == NEW_TOKENS for answer in answers)
    staged = engine.stage_weights(tmp_path / "model")
    assert {parameter.dtype for parameter in staged.model.parameters()} == {torch.bfloat16}


def test_tokens_that_are_read_a_step_later_are_the_same(device: str, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model")
    at_once, later = (
        outputs_of(GenerationEngine(directory, device=device, read_lag=lag), temperature=1.0) for lag in (0, 1)
    )
    for one, other in zip(at_once, later, strict=True):
        assert (one.output_ids, one.finish_reason) == (other.output_ids, other.finish_reason)
        assert one.output_logprobs == pytest.approx(other.output_logprobs, abs=1e-3)
