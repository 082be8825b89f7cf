"""New weights are taken over whole or not at all."""

import gc
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from corral.workers.engine import weights as checksums
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.linear import Linear
from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling import SamplingParams
from corral.workers.engine.weights import Checksums, WeightsRejectedError, stage_weights
from tests.workers.engine.tiny_models import load_reference, reference_greedy, save_tiny_model

REQUEST = GenerationRequest(
    request_id="a", prompt=(5, 9, 3), sampling=SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
)


def greedy(engine: GenerationEngine) -> list[int]:
    return list(engine.generate([REQUEST])[0].output_ids)


def test_an_update_serves_what_transformers_would_load(directories: list[Path]) -> None:
    engine = GenerationEngine(directories[0], version="1.0")
    engine.apply_weights(engine.stage_weights(directories[1]), version="1.1")
    assert greedy(engine) == reference_greedy(load_reference(directories[1]), REQUEST.prompt, max_new_tokens=12)
    assert engine.version == "1.1"


@pytest.mark.parametrize("intermediate_size", [96, 8192], ids=["transposed", "in blocks"])
def test_an_update_also_renews_the_copies_of_the_weights(intermediate_size: int, tmp_path: Path) -> None:
    old, new = (
        save_tiny_model(tmp_path / f"{seed}", seed=seed, intermediate_size=intermediate_size) for seed in range(2)
    )
    engine = GenerationEngine(old)
    for directory in (old, new):
        engine.apply_weights(engine.stage_weights(directory), version="1.1")
        prompts = [(index, index + 1) for index in range(8)]
        outputs = engine.generate(replace(REQUEST, request_id=str(prompt), prompt=prompt) for prompt in prompts)
        reference = load_reference(directory)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.output_ids) == reference_greedy(reference, prompt, max_new_tokens=12)


@pytest.mark.parametrize("num_rows", [1, 4, 33])
@pytest.mark.parametrize("num_outputs", [512, 2048], ids=["transposed", "in blocks"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_product_by_a_copy_equals_that_by_the_weight(num_rows: int, num_outputs: int, has_bias: bool) -> None:
    weight, inputs = torch.randn(num_outputs, 256), torch.randn(num_rows, 256)
    bias = torch.randn(num_outputs) if has_bias else None
    linear = Linear((weight, bias))
    for factor in (1, 2):
        weight.mul_(factor)
        linear.pack()
        expected = torch.nn.functional.linear(inputs, weight, bias)
        torch.testing.assert_close(linear(inputs), expected, atol=1e-4, rtol=1e-5)


def test_weights_in_several_files_are_read_through_their_index(directories: list[Path], tmp_path: Path) -> None:
    sharded = save_tiny_model(tmp_path / "sharded", seed=1, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    engine = GenerationEngine(directories[0])
    engine.apply_weights(engine.stage_weights(sharded), version="1.1")
    assert greedy(engine) == reference_greedy(load_reference(sharded), REQUEST.prompt, max_new_tokens=12)


def test_weights_of_another_precision_are_converted_as_at_start_up(directories: list[Path]) -> None:
    engine = GenerationEngine(directories[0], dtype="bfloat16")
    engine.apply_weights(engine.stage_weights(directories[1]), version="1.1")
    assert greedy(engine) == greedy(GenerationEngine(directories[1], dtype="bfloat16"))


def test_a_tied_head_may_be_stored_twice_but_not_differ(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "tied", seed=0, model_type="qwen3")
    engine = GenerationEngine(directory)
    before = greedy(engine)

    def store_head(change: float) -> Path:
        copy = tmp_path / f"with-head-{change}"
        shutil.copytree(directory, copy)
        tensors = load_file(copy / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
        save_file(tensors, copy / "model.safetensors")
        return copy

    engine.apply_weights(engine.stage_weights(store_head(0)), version="1.1")
    assert greedy(engine) == before
    with pytest.raises(WeightsRejectedError, match="ties lm_head.weight to its embedding, but the file's two differ"):
        engine.apply_weights(engine.stage_weights(store_head(0.5)), version="1.2")


def remove_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def add_unknown(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)


def change_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(63)


def quantise(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)


def poison(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"][5] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_norm, "1 tensors are missing: model.norm.weight"),
        (add_unknown, "not the model's: model.layers.9.mlp.up_proj.weight"),
        (change_shape, r"model.norm.weight has shape \(63,\), the model's is \(64,\)"),
        (quantise, "model.norm.weight has dtype I8, expected one of BF16, F16, F32"),
        (poison, "model.norm.weight holds NaN or infinity"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(
    directories: list[Path],
    tmp_path: Path,
    spoil: Callable[[dict[str, Tensor]], None],
    message: str,
) -> None:
    engine = GenerationEngine(directories[0], version="1.0")
    before = greedy(engine)
    tensors = load_file(directories[1] / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsRejectedError, match=message):
        engine.apply_weights(engine.stage_weights(tmp_path), version="1.1")
    assert greedy(engine) == before
    assert engine.version == "1.0"


def test_unreadable_weights_are_refused(directories: list[Path], tmp_path: Path) -> None:
    engine = GenerationEngine(directories[0])
    for path in (tmp_path / "absent", Path("/dev/null"), Path("\0"), Path("a" * 10_000)):
        with pytest.raises(WeightsRejectedError, match="weights in"):
            engine.stage_weights(path)
    content = (directories[1] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsRejectedError, match="could not be read"):
        engine.apply_weights(engine.stage_weights(tmp_path), version="1.1")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(WeightsRejectedError, match="'../model.safetensors', which is no plain file name"):
        engine.apply_weights(engine.stage_weights(tmp_path), version="1.1")


def test_reading_weights_again_and_again_leaves_nothing_behind(tmp_path: Path) -> None:
    tensors = {f"w{index}": torch.zeros(1) for index in range(400)}
    save_file(tensors, tmp_path / "model.safetensors")
    held = []
    for times in (10, 50):
        for _ in range(times):
            stage_weights(tmp_path, tensors)
        gc.collect()
        held.append(psutil.Process().memory_info().rss)
    assert held[1] - held[0] < 0.6 * 2**20  # 60 bytes for each of 20,000 tensors would be 1.2 MB


# --- checksums of live weights --------------------------------------------------------------------------------------


def sha256_of(*values: float) -> str:
    return hashlib.sha256(torch.tensor(values).numpy().tobytes()).hexdigest()[:16]


def test_a_tensor_is_hashed_once_until_somebody_writes_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.tensor([1.0, 2.0])) for name in ("a", "b", "c")})
    held = Checksums(model)
    names = held.names(skipped=["c"])
    assert held.of(names) == {"a": sha256_of(1.0, 2.0), "b": sha256_of(1.0, 2.0)}
    hashed = []
    hash_data = checksums.fingerprint
    monkeypatch.setattr(checksums, "fingerprint", lambda data: [hashed.append(data), hash_data(data)][1])
    assert held.of(names) == {"a": sha256_of(1.0, 2.0), "b": sha256_of(1.0, 2.0)} and not hashed
    with torch.no_grad():
        model["a"][1] = 3.0
    assert held.of(names) == {"a": sha256_of(1.0, 3.0), "b": sha256_of(1.0, 2.0)}
    assert len(hashed) == 1
