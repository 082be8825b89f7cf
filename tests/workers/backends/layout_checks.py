"""What ranks of a trainer group have seen in `layout_scene`, beside what is right; the same for every backend.

Part ── make_scene: start the ranks ──► Scene ──► assert_trained_alike, assert_goes_on_alike
cases ── make_variants: the same ─────► VariantScene ──► assert_like_one_rank
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral.experiments.config.model import Recompute
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.files.stored_states import whole_state
from tests.workers.backends.layout_scene import (
    NUM_STEPS,
    SAVED_AFTER,
    VARIANTS,
    MakeEngine,
    Stats,
    answers_of,
    batch,
    make_engine,
    mesh_of,
    plain_loop,
    play_layouts,
    play_variants,
    save_tiny,
    train_variant,
)
from tests.workers.backends.trainer_helpers import DEADLINE_S, play
from tests.workers.backends.training_helpers import read_weights
from tests.workers.some_samples import some_of

MODES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Part:
    """What is trained in one start of the ranks."""

    models: tuple[str, ...]
    layouts: Mapping[str, Recompute]
    """What each of them computes again."""
    chains: tuple[tuple[str, ...], ...]
    """Layouts, each of which goes on where the one before has stopped."""


@dataclass(frozen=True)
class Scene:
    """What the ranks have seen, and what a plain loop has made of the same models and batches."""

    directory: Path
    ranks: list[dict[str, Any]]
    plain: dict[str, tuple[Any, Stats]]

    def seen(self, kind: str, layout: str) -> list[dict[str, Any]]:
        """By rank of the layout."""
        return [self.ranks[rank][f"{kind} {layout}"] for rank in mesh_of(layout.split(">")[-1]).ranks]


def make_scene(
    directory: Path,
    part: Part,
    *,
    save: Callable[[str, Path], Path] = save_tiny,
    make: MakeEngine = make_engine,
    make_fsdp: MakeEngine = make_engine,
    plain: Callable[[Path], tuple[Any, Stats]] = plain_loop,
    world_size: int = 4,
) -> Scene:
    """
    Args:
        save: writes a model of a kind into a directory.
        make: the backend's engine.
        make_fsdp: that of layouts with `fsdp:` before them.
        plain: trains the model of a directory without either.
        world_size: of the trainer group, of which a layout takes as many as it needs.
    """
    paths = [save(kind, directory / kind) for kind in part.models]
    out = directory / "out"
    arguments = (paths, part.layouts, part.chains, out, make, make_fsdp)
    play(play_layouts, *arguments, world_size=world_size, directory=directory)
    return Scene(out, _ranks(out, world_size), {path.name: plain(path) for path in paths})


def _ranks(directory: Path, world_size: int) -> list[dict[str, Any]]:
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


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
        np.testing.assert_allclose(rank["logprobs"], _logprobs_of_share(model, layout, rank["dp_rank"]), atol=1e-3)


def _logprobs_of_share(model: Any, layout: str, dp_rank: int) -> list[float]:
    """Of the answers of one data-parallel rank, in their order; 0 on prompts."""
    sample = batch(NUM_STEPS)
    own = some_of(sample, [uid for i, uid in enumerate(sample.uids) if i % mesh_of(layout).dims.dp == dp_rank])
    numbers: list[float] = []
    with torch.no_grad():
        for tokens, prompt_length in answers_of(own):
            logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], -1)
            responses = logprobs.gather(1, tokens[1:, None])[prompt_length - 1 :, 0].tolist()
            numbers += [0.0] * (prompt_length - 1) + responses
    return numbers


def assert_goes_on_alike(scene: Scene, kind: str, chain: Sequence[str]) -> None:
    """The next losses of all layouts of a chain against those of its first one; the state is handed on bit for bit."""
    expected = scene.seen(kind, chain[0])[0]["stats"][SAVED_AFTER:]
    saved = whole_state(scene.directory / kind / chain[0] / "state")
    for end in range(2, len(chain) + 1):
        path = ">".join(chain[:end])
        for rank in scene.seen(kind, path):
            for own, stats in zip(expected, rank["stats"], strict=True):
                assert stats["sft/loss"] == pytest.approx(own["sft/loss"], abs=1e-5), path
        handed_on = whole_state(scene.directory / kind / path / "state")
        assert handed_on.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(handed_on[name], tensor), (path, name)


def assert_part_is_alike(scene: Scene, part: Part) -> None:
    """All of it."""
    for kind in part.models:
        for layout in part.layouts:
            assert_trained_alike(scene, kind, layout)
        for chain in part.chains:
            assert_goes_on_alike(scene, kind, chain)


@dataclass(frozen=True)
class VariantScene:
    """What ranks have made of each (variant, layout), and one rank of the fsdp backend of each variant."""

    directory: Path
    ranks: list[dict[str, Any]]
    alone: dict[str, dict[str, Any]]


def make_variants(
    directory: Path, cases: Sequence[tuple[str, str]], *, make: MakeEngine = make_engine, world_size: int
) -> VariantScene:
    model = save_tiny("qwen2", directory / "model")
    arguments = (model, cases, directory, make)
    play(play_variants, *arguments, world_size=world_size, directory=directory, deadline_s=2 * DEADLINE_S)
    alone = {
        name: train_variant(VARIANTS[name], model, ParallelContext(), directory / name)
        for name in dict.fromkeys(name for name, _ in cases)
    }
    return VariantScene(directory, _ranks(directory, world_size), alone)


def assert_like_one_rank(scene: VariantScene, name: str, layout: str) -> None:
    """Statistics, scores, greedy answers and weights of a variant in a layout, against one rank's."""
    variant, expected = VARIANTS[name], scene.alone[name]
    for number in mesh_of(layout).ranks:
        seen = scene.ranks[number][f"{name} {layout}"]
        for stats, own in zip(seen["stats"], expected["stats"], strict=True):
            assert stats == pytest.approx(own, rel=variant.tolerance, abs=variant.tolerance / 10)
        for key, values in expected["said"].items() if mesh_of(layout).dims.dp == 1 else ():  # else of its own answers
            np.testing.assert_allclose(seen["said"][key], values, atol=variant.tolerance)
        if variant.dtype == torch.float32:
            assert seen.get("generated") == expected.get("generated")
    for part in ("", "adapter", "blend"):
        saved = read_weights(scene.directory / f"{name} {layout}" / part)
        own_weights = read_weights(scene.directory / name / part)
        assert saved.keys() == own_weights.keys()
        for key, tensor in own_weights.items():
            np.testing.assert_allclose(saved[key].float(), tensor.float(), atol=variant.tolerance, err_msg=key)
