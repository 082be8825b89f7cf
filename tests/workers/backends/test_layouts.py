"""Every layout of the fsdp backend trains like a plain loop over transformers, and goes on where another stopped."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral.experiments.config.model import Recompute
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.gang_helpers import play
from tests.workers.backends.layout_scene import (
    NUM_STEPS,
    SAVED_AFTER,
    VARIANTS,
    Stats,
    answers_of,
    batch,
    mesh_of,
    plain_loop,
    play_layouts,
    play_variants,
    save_tiny,
    train_variant,
)
from tests.workers.backends.training_helpers import read_weights


@dataclass(frozen=True)
class Part:
    """What is trained in one start of the ranks."""

    models: tuple[str, ...]
    layouts: Mapping[str, Recompute]
    """What each of them computes again."""
    resumes: tuple[tuple[str, str], ...]
    """(layout that saves, layout that goes on)."""


LAYOUTS = ("d1", "d2", "t2", "c2", "c4", "d2t2", "d2c2", "t2c2")
FEW = Part(
    models=("qwen3",),
    layouts={"t2": "selective", "d2t2": "full", "d2c2": "full", "t2c2": "selective"},
    resumes=(("d2c2", "d2t2"), ("d2t2", "t2"), ("t2c2", "d2c2")),
)
PAIRS = tuple((before, after) for before in LAYOUTS for after in LAYOUTS if before != after)
RESUMES = {
    "qwen2": tuple(zip(LAYOUTS, LAYOUTS[1:], strict=False)),
    "qwen3": PAIRS,
    "llama": tuple(zip(LAYOUTS[1:], LAYOUTS, strict=False)),
}
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
ALL = {
    f"{kind}, recompute {how}": Part(
        models=(kind,), layouts=dict.fromkeys(LAYOUTS, how), resumes=RESUMES[kind] if how == "none" else ()
    )
    for kind in RESUMES
    for how in MODES
}


@dataclass(frozen=True)
class Scene:
    """What four ranks have seen, and what a plain loop has made of the same models and batches."""

    directory: Path
    ranks: list[dict[str, Any]]
    plain: dict[str, tuple[Any, Stats]]

    def seen(self, kind: str, layout: str) -> list[dict[str, Any]]:
        """By rank of the layout."""
        return [self.ranks[rank][f"{kind} {layout}"] for rank in mesh_of(layout.split(">")[-1]).ranks]


def make_scene(directory: Path, part: Part) -> Scene:
    paths = [save_tiny(kind, directory / kind) for kind in part.models]
    play(play_layouts, paths, part.layouts, part.resumes, directory / "out", world_size=4, directory=directory)
    ranks = [json.loads((directory / "out" / f"rank-{rank}.json").read_text()) for rank in range(4)]
    return Scene(directory / "out", ranks, {path.name: plain_loop(path) for path in paths})


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("few"), FEW)


def assert_trained_alike(scene: Scene, kind: str, layout: str) -> None:
    """Parameters, statistics and log-probabilities of each rank against the plain loop."""
    model, expected = scene.plain[kind]
    seen = scene.seen(kind, layout)
    for number, rank in enumerate(seen):
        assert rank["stats"] == seen[0]["stats"], number
        for step in range(NUM_STEPS):
            for name, value in expected[step].items():
                assert rank["stats"][step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)
    weights = read_weights(scene.directory / kind / layout / "weights")
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(weights[name], parameter.detach(), atol=1e-4, err_msg=name)
    for rank in seen:
        np.testing.assert_allclose(rank["logprobs"], logprobs_of_share(model, layout, rank["dp_rank"]), atol=1e-3)


def logprobs_of_share(model: Any, layout: str, dp_rank: int) -> list[float]:
    """Of the answers of one data-parallel rank, in their order; 0 on prompts."""
    sample = batch(NUM_STEPS)
    own = sample.select([uid for i, uid in enumerate(sample.uids) if i % mesh_of(layout).dims.dp == dp_rank])
    numbers: list[float] = []
    with torch.no_grad():
        for tokens, prompt_length in answers_of(own):
            logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], -1)
            responses = logprobs.gather(1, tokens[1:, None])[prompt_length - 1 :, 0].tolist()
            numbers += [0.0] * (prompt_length - 1) + responses
    return numbers


def assert_goes_on_alike(scene: Scene, kind: str, before: str, after: str) -> None:
    expected = scene.seen(kind, before)[0]["stats"][SAVED_AFTER:]
    for rank in scene.seen(kind, f"{before}>{after}"):
        for own, stats in zip(expected, rank["stats"], strict=True):
            assert stats["sft/loss"] == pytest.approx(own["sft/loss"], abs=1e-5)


@pytest.mark.parametrize("layout", FEW.layouts)
def test_a_layout_trains_like_a_plain_loop(layout: str, few: Scene) -> None:
    assert_trained_alike(few, "qwen3", layout)


@pytest.mark.parametrize(("before", "after"), FEW.resumes)
def test_a_layout_goes_on_where_another_one_stopped(before: str, after: str, few: Scene) -> None:
    assert_goes_on_alike(few, "qwen3", before, after)


@pytest.mark.slow
@pytest.mark.parametrize("part", ALL.values(), ids=ALL)
def test_every_layout_trains_every_kind_of_model_like_a_plain_loop(part: Part, tmp_path: Path) -> None:
    scene = make_scene(tmp_path, part)
    (kind,) = part.models
    for layout in part.layouts:
        assert_trained_alike(scene, kind, layout)
    for before, after in part.resumes:
        assert_goes_on_alike(scene, kind, before, after)


CASES = (
    *((name, "c2") for name in ("value", "scalar", "lora")),
    *((name, "t2") for name in ("value", "muon", "bfloat16")),
)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("variants")
    model = save_tiny("qwen2", directory / "model")
    play(play_variants, model, CASES, directory, world_size=2, directory=directory)
    for name in VARIANTS:
        seen = train_variant(VARIANTS[name], model, ParallelContext(), directory / name)
        (directory / f"{name}.json").write_text(json.dumps(seen))
    return directory, [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_heads_optimizers_and_adapters_train_in_a_layout_as_on_one_rank(
    name: str, layout: str, variants: tuple[Path, list[dict[str, Any]]]
) -> None:
    directory, ranks = variants
    tolerance = VARIANTS[name].tolerance
    expected = json.loads((directory / f"{name}.json").read_text())
    for rank in ranks:
        seen = rank[f"{name} {layout}"]
        for stats, own in zip(seen["stats"], expected["stats"], strict=True):
            assert stats == pytest.approx(own, rel=tolerance, abs=tolerance / 10)
        for key, values in expected["said"].items():
            np.testing.assert_allclose(seen["said"][key], values, atol=tolerance)
        if VARIANTS[name].dtype == torch.float32:
            assert seen.get("generated") == expected.get("generated")
    for part in ("", "blend"):
        saved, own = read_weights(directory / f"{name} {layout}" / part), read_weights(directory / name / part)
        assert saved.keys() == own.keys()
        for key, tensor in own.items():
            np.testing.assert_allclose(saved[key].float(), tensor.float(), atol=tolerance, err_msg=key)
