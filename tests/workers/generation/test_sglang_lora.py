"""An exported adapter in a server of SGLang that holds the base alone, loaded as it was written."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from corral.experiments.config.model import LoraConfig
from corral.experiments.config.rollout import FlagValue
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.test_lora import train
from tests.workers.backends.training_helpers import optimizer_config
from tests.workers.engine.tiny_models import load_reference, reference_logprobs, save_tiny_model
from tests.workers.generation.servers import serving

PROMPT = [7, 31, 15, 8]
LORA_FLAGS: Mapping[str, FlagValue] = {
    "enable-lora": True,
    "lora-backend": "torch_native",
    "max-lora-rank": 8,
    "lora-target-modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


@pytest.mark.slow
def test_an_exported_adapter_is_loaded_by_sglang_with_the_same_logprobs(tmp_path: Path) -> None:
    base, version = save_tiny_model(tmp_path / "base", seed=1), tmp_path / "v1"
    engine = FSDPEngine(
        base,
        context=ParallelContext(),
        optimizer=optimizer_config(lr=2e-2),
        lora=LoraConfig(rank=4, alpha=8.0),
        total_steps=10,
    )
    for step in range(5):
        train(engine, step)
    engine.save_weights(version)
    with serving("sglang", base, tmp_path, flags=LORA_FLAGS) as served:
        loaded = served.client.order("/load_lora_adapter", lora_name="v1", lora_path=str(version / "adapter"))
        assert loaded["success"], loaded
        sampling = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "lora_path": "v1"}
        status, answer = served.client.call("POST", "/generate", body)
    assert status == 200, answer
    said = torch.tensor([logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]])
    expected = {
        directory.name: reference_logprobs(load_reference(directory), PROMPT, answer["output_ids"])
        for directory in (version, base)
    }
    torch.testing.assert_close(said, expected["v1"], atol=1e-4, rtol=0.0)
    assert (said - expected["base"]).abs().max() > 0.1
