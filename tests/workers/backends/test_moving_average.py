"""A reference that follows the policy: what either backend keeps of the average is what a loop in float64 says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from tests.workers.backends.files.stored_states import whole_state
from tests.workers.backends.test_fsdp import trainable_sample
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import read_weights, save_tiny_model

LAYOUTS = ("fsdp:d2", "megatron:t2", "megatron:p2")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ETA, NUM_STEPS, SAVED_AFTER = 0.004, 9, 5
"""A step is less than half of a bfloat16's last bit, for weights that are half as large again."""


def given(model: Path, step: int) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights after some step."""
    for number, (name, weight) in enumerate(sorted(read_weights(model).items())):
        generator = torch.Generator().manual_seed(1000 * step + number)
        yield name, weight.float() * (1.5 + 0.1 * torch.rand(weight.shape, generator=generator))


def make_reference(layout: str, model: Path, context: ParallelContext, dtype: torch.dtype) -> Any:
    if layout.startswith("fsdp:"):
        return FSDPEngine(model, context=context, optimizer=None, compute_dtype=dtype)
    from corral.workers.backends.megatron.engine import MegatronEngine

    return MegatronEngine(model, context=context, optimizer=None, compute_dtype=dtype)


def play_rank(world: ParallelContext, directory: Path, layout: str) -> None:
    """Follow, save in between, and follow on from there in an engine of its own."""
    mesh = Mesh(ranks=(0, 1), dims=ParallelDims.parse(layout.rpartition(":")[2]))
    for context in mesh_contexts(world, {"ref": mesh}).values():
        assert context is not None
        for name, dtype in TYPES.items():
            folder, model = directory / f"{layout}-{name}", directory / name
            engine = make_reference(layout, model, context, dtype)
            for step in range(NUM_STEPS):
                engine.import_weights(given(model, step), eta=ETA)
                if step + 1 == SAVED_AFTER:
                    engine.state_shard().write(folder / "saved")
                    engine.save_weights(folder / "weights")
                    engine.offload()
            engine.state_shard().write(folder / "unfaulted")
            context.sum_over_mesh({"all have written": 0.0})
            resumed = make_reference(layout, folder / "weights", context, dtype)
            resumed.load_state(folder / "saved")
            for step in range(SAVED_AFTER, NUM_STEPS):
                resumed.import_weights(given(model, step), eta=ETA)
            resumed.state_shard().write(folder / "resumed")
            resumed.save_weights(folder / "published")
            said = [one.forward(trainable_sample())["logprobs"].copy() for one in (engine, resumed)]
            assert (said[0] == said[1]).all()
    context.sum_over_mesh({"all are done": 0.0})


@pytest.fixture(scope="module", params=LAYOUTS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    layout: str = request.param
    if layout.startswith("megatron:"):
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    directory = tmp_path_factory.mktemp("average")
    for name, dtype in TYPES.items():
        path = save_tiny_model(directory / name) / "model.safetensors"
        save_file({key: tensor.to(dtype) for key, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    play(play_rank, directory, layout, world_size=2, directory=directory)
    return layout, directory


@pytest.mark.parametrize("name", TYPES)
def test_the_average_moves_as_a_loop_in_float64_says(name: str, scene: tuple[str, Path]) -> None:
    layout, directory = scene
    first = read_weights(directory / name)
    expected = {key: weight.double() for key, weight in first.items()}
    for step in range(NUM_STEPS):
        for key, weight in given(directory / name, step):
            expected[key] = ETA * weight.double() + (1.0 - ETA) * expected[key]
    kept = whole_state(directory / f"{layout}-{name}" / "unfaulted")
    assert kept.keys() == {f"parameter.{key}" for key in expected}
    published = read_weights(directory / f"{layout}-{name}" / "published")
    for key, weight in expected.items():
        average = kept[f"parameter.{key}"]
        assert average.dtype == torch.float32
        torch.testing.assert_close(average, weight.float(), rtol=1e-5, atol=1e-7)
        assert torch.equal(published[key], average.to(TYPES[name]))
    assert not any(torch.equal(published[key], weight) for key, weight in first.items() if weight.any())


@pytest.mark.parametrize("name", TYPES)
def test_it_goes_on_from_a_commit_bit_for_bit(name: str, scene: tuple[str, Path]) -> None:
    layout, directory = scene
    folder = directory / f"{layout}-{name}"
    unfaulted, resumed = whole_state(folder / "unfaulted"), whole_state(folder / "resumed")
    assert unfaulted.keys() == resumed.keys()
    assert all(torch.equal(unfaulted[key], resumed[key]) for key in unfaulted)
