"""A GRPO trial that trains adapters: what servers are given, what survives a kill, and what it leaves behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Material, Trial
from tests.workers.backends.test_lora import layers_of
from tests.workers.checkpoint.test_low_rank import by_a_loop

RANK, ALPHA = 4, 10.0
PREFIX = "base_model.model."


@pytest.mark.parametrize("allocation", ["hf:d1+fsdp:d1", "hf:d1+megatron:t2"])
@pytest.mark.slow  # adapters are trained in tests/workers/backends, and served in test_backends.py
def test_adapters_are_started_from_trained_served_and_resumed_from_and_the_base_stays(
    start_trial: Callable[..., Trial], material: Material, tmp_path: Path, allocation: str
) -> None:
    base = load_file(material.model / "model.safetensors")
    started_from = write_adapter(tmp_path / "adapter", base)
    trial = start_trial(
        num_rows=40,
        pause_s=0.1,
        overrides={
            "allocation": allocation,
            "actor.lora": f"{{rank: {RANK}, alpha: {ALPHA}, adapter: {started_from}}}",
            "actor.optimizer.lr": 1e-2,
            "weights.transport": "lora",
            "control.commit_every": "2 steps",
            "evaluation.every": "1000 steps",
            "weights.update_mode": "in_place",
        },
    )
    trial.wait_for_steps(3)
    trial.kill("model_worker/0")  # what it goes on from is the base, and the adapters of a commit
    trial.full_speed()
    trial.wait_for_end()

    first = next(line for line in trial.metrics() if line["step"] == 1 and "gap/tokens" in line)
    # Servers answer with base and adapter from the first token on: the base alone is off by far more.
    assert first["gap/tokens"] > 0 and first["gap/max"] < 1e-3
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert trial.train_steps() == [1, 2, 3, 4, 5]
    assert (
        "files from the version before, 0 read whole"
        in trial.directory.worker_log(0, "generation_server", 0).read_text()
    )
    check_no_token_was_too_old(trial, eta=1)
    final = trial.directory.exports_path / "final"
    adapter = read_adapter(final)
    assert_is_base_and_adapter(final, base, adapter)
    last = max(trial.directory.checkpoints_path.glob("step-*"))
    assert read_adapter(last / "weights").keys() == adapter.keys()
    states = [load_file(path) for path in (last / "state" / "actor").glob("*.safetensors")]
    if "fsdp" in allocation:  # megatron-core has names of its own
        assert {name.partition(".")[2].partition("[")[0] for state in states for name in state} == adapter.keys()
    config = json.loads((final / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (RANK, ALPHA, str(material.model))


def write_adapter(directory: Path, base: dict[str, torch.Tensor]) -> Path:
    """As peft would, beside all linear layers; what it adds is as large as the weights are."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in base.items():
        if ".layers." in name and weight.dim() == 2:
            layer = f"{PREFIX}{name.removesuffix('.weight')}"
            tensors[f"{layer}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator)
            tensors[f"{layer}.lora_B.weight"] = 0.02 * torch.randn(weight.shape[0], RANK, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def read_adapter(weights: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(weights / "adapter" / "adapter_model.safetensors")
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def assert_is_base_and_adapter(weights: Path, base: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor]) -> None:
    """Bit for bit, and something was learned."""
    expected = dict(base)
    for name, a, b in layers_of(adapter):
        expected[f"{name}.weight"] = torch.from_numpy(
            by_a_loop(base[f"{name}.weight"].numpy(), a.numpy(), b.numpy(), ALPHA / RANK)
        )
        assert not torch.equal(expected[f"{name}.weight"], base[f"{name}.weight"])
    exported = load_file(weights / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(exported[name], expected[name])] == []
