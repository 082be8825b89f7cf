"""Both training engines compute on the device what a plain loop over transformers computes on the CPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from corral.experiments.config.model import LoraConfig
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from corral.workers.model.reallocation import reallocate
from tests.workers.backends.layout_scene import (
    NUM_STEPS,
    MakeEngine,
    Variant,
    make_engine,
    plain_loop,
    save_tiny,
    train,
)
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import read_weights

pytestmark = pytest.mark.gpu
FLOAT32, BFLOAT16 = Variant(), Variant(dtype=torch.bfloat16, tolerance=5e-2)
ADAPTERS = Variant(lora=LoraConfig(rank=2, alpha=8.0))


@pytest.fixture(params=["fsdp", "megatron"])
def make(request: pytest.FixtureRequest, device: str) -> MakeEngine:
    if request.param == "fsdp":
        return make_engine
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from tests.workers.backends.megatron_scene import make_megatron

    return make_megatron


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"))


def train_on_all(
    world: ParallelContext, model: Path, variant: Variant, make: MakeEngine, layout: str, directory: Path
) -> None:
    """What one rank does: train, leave the device and come back between steps, and say where everything was."""
    context = mesh_contexts(world, {"all": Mesh(ranks=world.mesh.ranks, dims=ParallelDims.parse(layout))})["all"]
    assert context is not None
    engine = make(model, context, variant)
    stats = train(engine, range(2))
    engine.offload()
    stats += train(engine, range(2, NUM_STEPS))
    exported = {tensor.device.type for _, tensor in engine.export_weights()}
    engine.save_weights(directory / "weights")
    seen: dict[str, Any] = {"stats": stats, "devices": sorted(exported), "device": str(world.device)}
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(seen))
    if world.group is not None:
        dist.barrier(group=world.group)  # rank 0 has the store


def seen_by_rank(directory: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


def test_an_engine_trains_on_its_devices_like_a_plain_loop_on_the_cpu(
    make: MakeEngine, model: Path, device: str, num_devices: int, tmp_path: Path
) -> None:
    layout = f"d{num_devices}"
    play(
        train_on_all, model, FLOAT32, make, layout, tmp_path, world_size=num_devices, directory=tmp_path, device=device
    )
    reference, expected = plain_loop(model)
    for seen in seen_by_rank(tmp_path, num_devices):
        assert seen["device"].startswith(device) and seen["devices"] == [device]
        for own, plain in zip(seen["stats"], expected, strict=True):
            assert {name: own[name] for name in plain} == pytest.approx(plain, rel=1e-3, abs=1e-5)
    weights = read_weights(tmp_path / "weights")
    for name, parameter in reference.named_parameters():
        np.testing.assert_allclose(weights[name], parameter.detach(), atol=2e-4, err_msg=name)


def test_tensor_parallel_ranks_add_up_over_their_devices(
    make: MakeEngine, model: Path, device: str, two_devices: int, tmp_path: Path
) -> None:
    play(train_on_all, model, FLOAT32, make, "t2", tmp_path, world_size=two_devices, directory=tmp_path, device=device)
    _, expected = plain_loop(model)
    for seen in seen_by_rank(tmp_path, two_devices):
        for own, plain in zip(seen["stats"], expected, strict=True):
            assert own["sft/loss"] == pytest.approx(plain["sft/loss"], rel=1e-3)


def test_bfloat16_products_lose_little(make: MakeEngine, model: Path, device: str, tmp_path: Path) -> None:
    play(train_on_all, model, BFLOAT16, make, "d1", tmp_path, world_size=1, directory=tmp_path, device=device)
    _, expected = plain_loop(model)
    [seen] = seen_by_rank(tmp_path, 1)
    for own, plain in zip(seen["stats"], expected, strict=True):
        assert own["sft/loss"] == pytest.approx(plain["sft/loss"], rel=BFLOAT16.tolerance)
    assert {tensor.dtype for tensor in read_weights(tmp_path / "weights").values()} == {torch.bfloat16}


def test_adapters_train_on_the_device_as_on_the_cpu(make: MakeEngine, model: Path, device: str, tmp_path: Path) -> None:
    play(train_on_all, model, ADAPTERS, make, "d1", tmp_path, world_size=1, directory=tmp_path, device=device)
    reference = make_engine(model, ParallelContext(), ADAPTERS)
    expected = train(reference, range(NUM_STEPS))
    reference.save_weights(tmp_path / "expected")
    [seen] = seen_by_rank(tmp_path, 1)
    for own, other in zip(seen["stats"], expected, strict=True):
        assert own == pytest.approx(other, rel=1e-3, abs=1e-5)
    adapter = read_weights(tmp_path / "weights" / "adapter")
    for name, tensor in read_weights(tmp_path / "expected" / "adapter").items():
        np.testing.assert_allclose(adapter[name], tensor, atol=2e-4, err_msg=name)


def give_weights(world: ParallelContext, models: tuple[Path, Path], make: MakeEngine, directory: Path) -> None:
    """Rank 0 holds one model and rank 1 another; rank 1 takes rank 0's weights over, and writes what it has."""
    alone = {f"rank {rank}": Mesh(ranks=(rank,), dims=ParallelDims(dp=1)) for rank in world.mesh.ranks}
    contexts = mesh_contexts(world, {**alone, "both": Mesh(ranks=world.mesh.ranks, dims=ParallelDims(dp=2))})
    own = contexts[f"rank {world.rank}"]
    assert own is not None
    engine = make(models[world.rank], own, FLOAT32)
    reallocate(engine if world.rank == 0 else None, engine if world.rank == 1 else None, contexts["both"], eta=1.0)
    if world.rank == 1:
        engine.save_weights(directory / "taken")
    dist.barrier(group=world.group)


def test_weights_cross_from_one_device_to_another(
    make: MakeEngine, model: Path, device: str, two_devices: int, tmp_path: Path
) -> None:
    other = save_tiny("qwen3", tmp_path / "other", seed=2)
    play(give_weights, (model, other), make, tmp_path, world_size=two_devices, directory=tmp_path, device=device)
    taken, given, before = (read_weights(path) for path in (tmp_path / "taken", model, other))
    assert taken.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(taken[name], tensor), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in given.items())
