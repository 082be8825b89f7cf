"""A mixture of experts in the embedded engine: whom each token chose is whom transformers chooses, and stays so."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling import SamplingParams
from tests.workers.engine.tiny_models import (
    EXPERT_LAYERS,
    NUM_EXPERTS,
    TOP_K,
    load_reference,
    reference_logprobs,
    save_tiny_model,
)

PROMPTS = [(7,), (5, 9, 3, 33), (5, 9, 3, 33), tuple(range(1, 38)), (60, 2, 41)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of one mixture."""
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_model(root / f"v{seed}", seed=seed, model_type="qwen3_moe") for seed in range(2)]


def request(name: str, prompt: Sequence[int], *, experts_from: int | None = 0, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"ignore_eos": True, "max_new_tokens": 20, **sampling})
    return GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=params, experts_from=experts_from)


def choices(model: Any, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """[T, layers, k] whom transformers' routers choose, in ascending order; 0 in the dense layer."""
    chosen: dict[int, Tensor] = {}

    def hook_of(layer: int) -> Any:
        return lambda module, inputs, outputs: chosen.update({layer: outputs[2]})

    hooks = [model.model.layers[layer].mlp.gate.register_forward_hook(hook_of(layer)) for layer in EXPERT_LAYERS]
    with torch.no_grad():
        model(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    rows = np.zeros((len(tokens), 3, TOP_K), np.int64)
    for layer, experts in chosen.items():
        rows[:, layer] = experts.numpy()
    return np.sort(rows)


def test_each_token_says_whom_it_has_chosen_but_the_last_whom_nobody_has_read(directories: list[Path]) -> None:
    reference = load_reference(directories[0])
    requests = [request(str(index), prompt, sampling_seed=index) for index, prompt in enumerate(PROMPTS)]
    outputs = GenerationEngine(directories[0]).generate(requests)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.experts is not None
        np.testing.assert_array_equal(np.sort(output.experts), choices(reference, [*prompt, *output.output_ids])[:-1])
        assert len(np.unique(output.experts[:, EXPERT_LAYERS])) == NUM_EXPERTS or len(prompt) < 10


def test_rows_begin_where_they_are_asked_for_and_who_does_not_ask_gets_none(directories: list[Path]) -> None:
    prompt = PROMPTS[3]
    asked = {"all": 0, "end": len(prompt), "none": None}
    whole, end, none = GenerationEngine(directories[0]).generate(
        request(name, prompt, experts_from=first) for name, first in asked.items()
    )
    assert whole.experts is not None and end.experts is not None
    assert none.experts is None
    assert len(end.experts) == 19 and len(whole.experts) == len(prompt) + 19


def test_an_answer_that_newer_weights_read_again_keeps_the_experts_of_those_that_made_it(
    directories: list[Path],
) -> None:
    old, new = (load_reference(directory) for directory in directories)
    prompt = PROMPTS[1]
    engine = GenerationEngine(directories[0], version="1.0")
    engine.add(request("a", prompt))
    for _ in range(8):
        assert not engine.step()
    engine.pause("retract")
    engine.apply_weights(engine.stage_weights(directories[1]), version="1.1")
    engine.resume()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    [output] = outputs
    tokens = [*prompt, *output.output_ids]
    by_old, by_new = output.weight_versions
    before = len(prompt) + by_old.end - 1  # their last token was made and not yet read
    assert output.experts is not None and by_new.end == 20
    np.testing.assert_array_equal(np.sort(output.experts[:before]), choices(old, tokens)[:before])
    np.testing.assert_array_equal(np.sort(output.experts[before:]), choices(new, tokens)[before:-1])
    assert not np.array_equal(choices(old, tokens)[before:], choices(new, tokens)[before:])


def test_an_aborted_request_says_whom_the_tokens_chose_that_it_has(directories: list[Path]) -> None:
    engine = GenerationEngine(directories[0])
    engine.add(request("runs", PROMPTS[1]))
    for _ in range(3):
        engine.step()
    engine.add(request("waits", PROMPTS[1]))
    outputs = {output.request_id: output for output in engine.abort(None)}
    runs, waits = outputs["runs"], outputs["waits"]
    assert runs.experts is not None and len(runs.experts) == len(PROMPTS[1]) + len(runs.output_ids) - 1
    assert waits.experts is None and not waits.output_ids


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rounded_mixture_answers_nearly_alike(directories: list[Path], dtype: str, quantization: Any) -> None:
    engine = GenerationEngine(directories[0], dtype=dtype, quantization=quantization)
    [output] = engine.generate([request("a", PROMPTS[3], sampling_seed=1)])
    expected = reference_logprobs(load_reference(directories[0]), PROMPTS[3], output.output_ids)
    gap = (torch.tensor(output.output_logprobs) - expected).abs().mean()
    assert gap < (1e-5 if dtype == "float32" and quantization is None else 0.5)


def test_a_dense_model_has_no_experts_to_say(tmp_path: Path) -> None:
    engine = GenerationEngine(save_tiny_model(tmp_path / "dense"))
    with pytest.raises(ValueError, match="has no experts"):
        engine.add(request("a", [1, 2]))
