"""Several models on the ranks of one trainer group: each computes in its own mesh as if nothing else was there.

One trainer group of four processes plays all scenes; the tests compare what it wrote with one rank in this process.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import (
    make_sample,
    read_weights,
    save_tiny_model,
    tiny_engine,
)
from tests.workers.some_samples import some_of

MESHES = {
    "alone": Mesh(ranks=(0,), dims=ParallelDims()),
    "apart": Mesh(ranks=(1, 2), dims=ParallelDims(dp=2)),
    "overlapping": Mesh(ranks=(0, 1), dims=ParallelDims(dp=2)),
    "backwards": Mesh(ranks=(2, 1), dims=ParallelDims(dp=2)),
    "grid": Mesh(ranks=(3, 1, 0, 2), dims=ParallelDims(dp=2, tp=2)),
    "twins": Mesh(ranks=(1, 2), dims=ParallelDims(dp=2)),
}
TRAINED = ("alone", "apart", "overlapping", "backwards")
NUM_STEPS = 2
LENGTHS = [[5, 17, 9], [30, 4, 4], [3, 12], [20, 8, 21, 6]]


def sample_of(context: ParallelContext, step: int) -> SequenceSample:
    """This data-parallel rank's share of a batch that is the same in every mesh."""
    sample = make_sample(LENGTHS, seed=step)
    return some_of(sample, sample.uids[context.dp_rank :: context.mesh.dims.dp])


def train(model: Path, context: ParallelContext, directory: Path) -> list[dict[str, float]]:
    engine = tiny_engine(model, context, max_tokens=64)
    stats = [SFTInterface().train_step(engine, sample_of(context, step), version=step) for step in range(NUM_STEPS)]
    engine.state_shard().write(directory / "state")
    engine.save_weights(directory / "weights")
    return stats


def play_rank(world: ParallelContext, model: Path, directory: Path) -> None:
    contexts = mesh_contexts(world, MESHES)
    seen: dict[str, Any] = {name: None for name in MESHES}
    for name, context in contexts.items():
        if context is not None:
            seen[name] = {
                "coords": context.coords,
                "is_first": context.mesh_rank == 0,
                "is_dp_head": context.is_dp_head,
                "sum": context.sum_over_ranks({"rank": float(10**world.rank)})["rank"],
                "text": [context.text_from(place, f"of {world.rank} \u03c0") for place in range(context.mesh.dims.dp)],
                "max": context.max_over_ranks({"rank": float(world.rank)})["rank"],
            }
    seen["shares a group"] = contexts["apart"] is None or _group(contexts["apart"]) is _group(contexts["twins"])
    seen["has the world's"] = [n for n, context in contexts.items() if context and context.group is world.group]
    for name in TRAINED:  # on rank 1 one after the other, elsewhere at the same time
        context = contexts[name]
        if context is not None:
            seen[f"stats of {name}"] = train(model, context, directory / name)
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(seen))


def _group(context: ParallelContext | None) -> object:
    assert context is not None
    return context.group


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("meshes")
    model = save_tiny_model(directory / "model")
    play(play_rank, model, directory, world_size=4, directory=directory)
    return {
        "directory": directory,
        "ranks": [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(4)],
        "single": train(model, ParallelContext(), directory / "single"),
    }


def test_every_rank_knows_its_place_in_each_mesh(scene: dict[str, Any]) -> None:
    for name, mesh in MESHES.items():
        for rank, seen in enumerate(scene["ranks"]):
            if rank not in mesh.ranks:
                assert seen[name] is None
                continue
            place = mesh.ranks.index(rank)
            assert seen[name]["coords"] == list(mesh.dims.coords(place))
            assert seen[name]["is_first"] == (place == 0)
            assert seen[name]["is_dp_head"] == (place in mesh.dims.dp_heads)


def test_sums_run_over_the_data_parallel_ranks_of_one_mesh(scene: dict[str, Any]) -> None:
    def sums(name: str) -> dict[int, float]:
        return {rank: seen[name]["sum"] for rank, seen in enumerate(scene["ranks"]) if seen[name]}

    assert sums("alone") == {0: 1.0}
    assert sums("apart") == sums("backwards") == {1: 110.0, 2: 110.0}
    assert sums("overlapping") == {0: 11.0, 1: 11.0}
    # Places (0, 2) and (1, 3) hold the same part of the model each: ranks 3 and 0, ranks 1 and 2.
    assert sums("grid") == {0: 1001.0, 3: 1001.0, 1: 110.0, 2: 110.0}
    assert {rank: seen["grid"]["max"] for rank, seen in enumerate(scene["ranks"])} == {0: 3.0, 3: 3.0, 1: 2.0, 2: 2.0}


def test_a_text_comes_from_one_data_parallel_rank_of_the_mesh(scene: dict[str, Any]) -> None:
    def texts(name: str) -> dict[int, list[str]]:
        return {rank: seen[name]["text"] for rank, seen in enumerate(scene["ranks"]) if seen[name]}

    assert texts("alone") == {0: ["of 0 \u03c0"]}
    assert texts("apart") == dict.fromkeys((1, 2), ["of 1 \u03c0", "of 2 \u03c0"])
    assert texts("backwards") == dict.fromkeys((1, 2), ["of 2 \u03c0", "of 1 \u03c0"])
    assert texts("grid") == dict.fromkeys((3, 0), ["of 3 \u03c0", "of 0 \u03c0"]) | dict.fromkeys(
        (1, 2), ["of 1 \u03c0", "of 2 \u03c0"]
    )


def test_meshes_of_the_same_ranks_share_a_group_and_none_has_that_which_moves_data(scene: dict[str, Any]) -> None:
    assert all(seen["shares a group"] and seen["has the world's"] == [] for seen in scene["ranks"])


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_trains_alike_in_every_mesh(name: str, scene: dict[str, Any]) -> None:
    for rank in MESHES[name].ranks:
        for expected, stats in zip(scene["single"], scene["ranks"][rank][f"stats of {name}"], strict=True):
            assert stats == pytest.approx(expected, abs=1e-5)
    expected_weights = read_weights(scene["directory"] / "single" / "weights")
    weights = read_weights(scene["directory"] / name / "weights")
    assert weights.keys() == expected_weights.keys()
    for key, tensor in expected_weights.items():
        np.testing.assert_allclose(weights[key], tensor, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", TRAINED)
def test_the_state_of_any_mesh_is_that_of_its_data_parallel_ranks_in_order(name: str, scene: dict[str, Any]) -> None:
    directory = scene["directory"]
    engine = tiny_engine(directory / "model")
    engine.load_state(directory / name / "state")
    saved = read_weights(directory / name / "weights")
    for key, tensor in engine.export_weights():
        assert tensor.equal(saved[key]), key


def test_a_place_in_another_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="model_worker/0 is not in the mesh of model_worker/1-2"):
        ParallelContext(rank=0, mesh=MESHES["apart"])
