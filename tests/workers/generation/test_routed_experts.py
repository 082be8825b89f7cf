"""A real server of SGLang says whom the tokens of a mixture chose, in the form that answers are put together from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.workers.episodes.routed_experts import AnswerExperts
from tests.workers.engine.tiny_models import load_reference
from tests.workers.generation.servers import Served, serving

pytestmark = pytest.mark.slow

NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 8, 2
SPEC = RoutedExpertsSpec(num_layers=NUM_LAYERS, expert_layers=(0, 1), num_experts=NUM_EXPERTS, top_k=TOP_K)
PROMPT = [7, 31, 15, 8]


def save_mixture(directory: Path, *, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        max_position_embeddings=512,
        eos_token_id=63,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_mixture(root / f"v{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def served(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(
        "sglang", models[0], tmp_path_factory.mktemp("server"), flags={"enable-return-routed-experts": True}
    ) as served:
        yield served


def choices(model: Path, tokens: list[int]) -> npt.NDArray[np.int16]:
    """[T - 1, layers, k] whom transformers' routers choose, in ascending order."""
    reference, chosen = load_reference(model), list[Tensor]()
    for layer in reference.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[2]))
    with torch.no_grad():
        reference(torch.tensor([tokens]))
    return np.sort(torch.stack(chosen, dim=1).numpy()[:-1])


def ask(served: Served, prompt: list[int], *, start: int, max_new_tokens: int) -> dict[str, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": max_new_tokens, "ignore_eos": True, "sampling_seed": 5},
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": start,
    }
    status, answer = served.client.call("POST", "/generate", body)
    assert status == 200, answer
    reply: dict[str, Any] = answer
    return reply


def test_an_answer_of_two_requests_over_an_update_has_the_experts_of_the_weights_that_made_each_token(
    served: Served, models: list[Path]
) -> None:
    experts = AnswerExperts(SPEC, PROMPT)
    tokens = list(PROMPT)
    for model, version in ((models[0], None), (models[1], "1.0")):
        if version is not None:
            served.bring_to(version, model)
        reply = ask(served, tokens, start=experts.num_rows, max_new_tokens=6)
        tokens += reply["output_ids"]
        text = reply["meta_info"]["routed_experts"]
        experts.append(experts.rows_in(text, num_tokens=len(tokens) - len(PROMPT)))
    rows = np.sort(experts.rows(num_tokens=len(tokens)))
    by_old = len(PROMPT) + 6 - 1
    np.testing.assert_array_equal(rows[:by_old], choices(models[0], tokens)[:by_old])
    np.testing.assert_array_equal(rows[by_old:-1], choices(models[1], tokens)[by_old:])
    assert (rows[-1] == -1).all()
