"""What ranks send each other of a model, and what they keep of it, in the type of the products and no wider."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from corral.experiments.config.model import LoraConfig
from corral.workers.backends.files.tensors import write_tensors
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.sharding import whole
from tests.workers.backends.test_memory_estimates import lm_loss
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import (
    LargestTensor,
    make_sample,
    read_weights,
    save_tiny_model,
    tiny_engine,
)

HIDDEN, INNER, VOCABULARY = 64, 96, 64
KEYS = HIDDEN // 2
LAYER = 2 * HIDDEN**2 + HIDDEN + 2 * (KEYS * HIDDEN + KEYS) + 3 * HIDDEN * INNER + 2 * HIDDEN
OUTPUT, REST = VOCABULARY * HIDDEN, VOCABULARY * HIDDEN + HIDDEN


class Collectives(TorchDispatchMode):
    """Bytes that come out of each kind of collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            target = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            if target.ndim:
                name = func.name().removeprefix("c10d::")
                self.bytes[name] = self.bytes.get(name, 0) + target.nbytes
        return func(*args, **(kwargs or {}))


def look_at_ranks(world: ParallelContext, folder: Path) -> None:
    seen: dict[str, Any] = {}
    sample = make_sample([[32, 32]])
    model = folder / "model"
    trained = tiny_engine(model, world, compute_dtype=torch.bfloat16)
    with Collectives() as collectives:
        trained.train_batch(sample, loss_fn=lm_loss, counted="prompt_mask")
    seen["train"] = collectives.bytes
    adapted = tiny_engine(model, world, lora=LoraConfig(rank=4, alpha=8.0), compute_dtype=torch.bfloat16)
    adapted.train_batch(sample, loss_fn=lm_loss, counted="prompt_mask")
    for name, engine in (("whole", trained), ("adapted", adapted)):
        with LargestTensor(torch.float32) as largest:
            engine.save_weights(folder / name)
        seen[f"{name} in float32"] = largest.numel
    read = tiny_engine(model, world, optimizer=None, is_held_low=True, compute_dtype=torch.bfloat16)
    read.forward(sample)
    seen["is cut"] = all(isinstance(parameter, DTensor) for parameter in read.model.parameters())
    expected = {name: whole(parameter) for name, parameter in trained._trained().items()}
    factors = {name: whole(parameter) for name, parameter in adapted._trained().items()}
    if world.mesh_rank == 0:
        write_tensors(folder / "expected.safetensors", expected)
        write_tensors(folder / "factors.safetensors", factors)
    (folder / f"{world.rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gathers")
    save_tiny_model(folder / "model")
    play(look_at_ranks, folder, world_size=2, directory=folder)
    return folder


def seen_by_ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_layers_and_output_are_gathered_in_bfloat16_and_their_gradients_added_up_in_float32(folder: Path) -> None:
    """Layers before they compute and before their gradients are made, the ends once."""
    for seen in seen_by_ranks(folder):
        assert seen["train"]["_allgather_base_"] == 2 * 2 * 2 * LAYER + 2 * OUTPUT + 4 * REST
        assert seen["train"]["_reduce_scatter_base_"] == 4 * (2 * LAYER + OUTPUT + REST) // 2


def test_nothing_stays_whole_after_a_forward_pass_without_a_backward_pass(folder: Path) -> None:
    assert [seen["is cut"] for seen in seen_by_ranks(folder)] == [True, True]


def test_weights_are_rounded_and_merged_by_their_owners_and_gathered_afterwards(folder: Path) -> None:
    for seen in seen_by_ranks(folder):
        half = HIDDEN * INNER // 2  # of the largest matrix: what a rank has of it
        assert seen["whole in float32"] <= half and seen["adapted in float32"] <= half
    expected = read_weights(folder)
    found = read_weights(folder / "whole")
    assert found.keys() <= expected.keys()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in found.items())
    base, merged = read_weights(folder / "model"), read_weights(folder / "adapted")
    name = "model.layers.1.mlp.down_proj"
    product = expected[f"{name}.lora_B.weight"] @ expected[f"{name}.lora_A.weight"] * 2.0
    assert product.any()
    torch.testing.assert_close(merged[f"{name}.weight"], (base[f"{name}.weight"].bfloat16() + product).bfloat16())


def test_a_model_that_is_only_read_is_held_in_the_type_of_its_products_and_says_the_same(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    low, high = (
        tiny_engine(directory, optimizer=None, is_held_low=is_held_low, compute_dtype=torch.bfloat16)
        for is_held_low in (True, False)
    )
    sample = make_sample([[5, 17, 9], [30, 4, 4]])
    np.testing.assert_array_equal(low.forward(sample)["logprobs"], high.forward(sample)["logprobs"])
    types = {name: parameter.dtype for name, parameter in low.model.named_parameters()}
    assert {name for name, dtype in types.items() if dtype == torch.float32} == {
        name for name in types if "norm" in name or "bias" in name or "embed" in name
    }
