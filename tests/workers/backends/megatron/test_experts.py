"""Mixtures of experts by megatron-core train like a plain loop over transformers, wherever their tokens are sent."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from safetensors.torch import load_file
from torch import Tensor

from corral.experiments.config.model import Recompute
from corral.workers.backends.files.weights import as_stored
from corral.workers.backends.grouped_product import as_one
from corral.workers.backends.megatron.experts import (
    MIXTRAL_NAMES,
    QWEN_NAMES,
    GroupedExperts,
    Replay,
    StoredNames,
    stack_experts,
)
from corral.workers.backends.megatron.model import ScoringModel
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.files.stored_states import whole_state
from tests.workers.backends.layout_scene import NUM_STEPS, OPTIMIZER, SAVED_AFTER, Variant
from tests.workers.backends.megatron.experts_scene import KINDS, PROMPT, forced_loop, play_experts, save_tiny_mixture
from tests.workers.backends.megatron_scene import make_megatron
from tests.workers.backends.test_memory_estimates import lm_loss
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import make_sample, read_weights

FEW: dict[str, Recompute] = {"d2t2e2": "selective", "c2p2e2": "full"}
PARTS = (("d1", "d2", "t2", "p2", "d2e2"), ("c2e2", "d2t2", "d4e2", "d4e4"), ("d2c2e4", "t2c2e2", "d2t2e2", "d2p2e2"))


@dataclass(frozen=True)
class Scene:
    """What the ranks have seen, and what a plain loop has made of the same model and batches."""

    directory: Path
    ranks: list[dict[str, Any]]
    plain: tuple[Any, Any, dict[str, torch.Tensor]]


def make_scene(kind: str, directory: Path, layouts: Any, resumes: Any, *, replays: bool) -> Scene:
    model = save_tiny_mixture(kind, directory / "model")
    play(play_experts, model, layouts, resumes, directory, replays, world_size=4, directory=directory)
    ranks = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(4)]
    return Scene(directory, ranks, forced_loop(model, replays=replays))


def assert_trained_alike(scene: Scene, layout: str) -> None:
    model, expected, gradients = scene.plain
    for stats in (rank[layout] for rank in scene.ranks if layout in rank):
        for step in range(NUM_STEPS):
            for name, value in expected[step].items():
                assert stats[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)
    state = whole_state(scene.directory / layout / "state")
    kept = (1 - OPTIMIZER.betas[0]) * min(1.0, OPTIMIZER.gradient_clipping / expected[0]["train/grad_norm"])
    assert len(state) == 4 * len(gradients)  # parameter, two moments, number of steps
    for name, gradient in gradients.items():
        np.testing.assert_allclose(state[f"exp_avg.{name}"] / kept, gradient, atol=1e-6, err_msg=name)
    saved = read_weights(scene.directory / layout / "weights")
    trained = dict(as_stored(model, model.named_parameters(), dtype=torch.float32))
    assert saved.keys() == trained.keys()
    for name, parameter in trained.items():
        np.testing.assert_allclose(saved[name], parameter.detach(), atol=2e-4, err_msg=name)


def assert_goes_on_alike(scene: Scene, before: str, after: str) -> None:
    expected = scene.ranks[0][before][SAVED_AFTER:]
    resumed = [rank[f"{before}>{after}"] for rank in scene.ranks if f"{before}>{after}" in rank]
    assert resumed
    for stats in resumed:
        for own, seen in zip(expected, stats, strict=True):
            assert seen["sft/loss"] == pytest.approx(own["sft/loss"], abs=1e-5)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene("mixed and shared", tmp_path_factory.mktemp("experts"), FEW, (), replays=True)


@pytest.mark.parametrize("layout", FEW)
def test_experts_over_ranks_compute_what_a_plain_loop_does_with_tokens_sent_where_they_went(
    layout: str, few: Scene
) -> None:
    assert_trained_alike(few, layout)


def test_a_copy_of_the_model_for_generation_says_what_the_trained_model_says(few: Scene) -> None:
    model, _, _ = few.plain
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            del layer.mlp.gate.forward  # tokens go where they did in training only there
    with torch.no_grad():
        expected = model(input_ids=PROMPT).logits
    np.testing.assert_allclose(load_file(few.directory / "logits.safetensors")["logits"], expected, atol=1e-3)


def topk(scores: torch.Tensor, k: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values, places = scores.topk(k, dim=1)
    return values, places


def test_a_token_goes_where_it_went_and_where_the_router_sends_it_if_nothing_is_said() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 3)
    told = torch.tensor([[0, 1], [-1, -1], [2, -1]], dtype=torch.int16)
    values, places = Replay(told).get_replay_topk(scores, 2, default_compute_topk=topk)
    assert places.tolist() == [[0, 1], [3, 2], [3, 2]]
    assert torch.equal(values, torch.tensor([[0.1, 0.2], [0.4, 0.3], [0.4, 0.3]]))


@pytest.mark.parametrize("told", [torch.zeros(3, 1, 2), torch.zeros(3, 2, 1)])
def test_experts_that_were_recorded_with_another_model_are_refused(told: torch.Tensor) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(num_moe_experts=4, moe_layer_freq=[1, 0, 1], moe_router_topk=2))
    with pytest.raises(ValueError, match="the model asks 2 in each of 2: they were recorded with another model"):
        ScoringModel._experts_of_own_tokens(model, told)


@given(
    st.sampled_from([QWEN_NAMES, MIXTRAL_NAMES]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_matrices_of_experts_are_stacked_in_their_order_however_they_come(
    names: StoredNames, layers: int, experts: int, random: Any
) -> None:
    stored = {"model.norm.weight": torch.ones(3), f"model.layers.0.{names.block}.gate.weight": torch.ones(2)} | {
        f"model.layers.{layer}.{names.block}.experts.{expert}.{matrix}.weight": torch.randn(shape)
        for layer in range(layers)
        for expert in range(experts)
        for matrix, shape in {names.gate: (2, 3), names.up: (2, 3), names.down: (3, 2)}.items()
    }
    stacked = dict(stack_experts(random.sample(list(stored.items()), len(stored)), names, num_experts=experts))
    assert len(stacked) == 2 + 2 * layers and "model.layers.0.mlp.gate.weight" in stacked
    for layer in range(layers):
        own, prefix = f"model.layers.{layer}.{names.block}.experts", f"model.layers.{layer}.mlp.experts"
        for expert in range(experts):
            gate, up = stacked[f"{prefix}.gate_up_proj"][expert].chunk(2)
            assert torch.equal(gate, stored[f"{own}.{expert}.{names.gate}.weight"])
            assert torch.equal(up, stored[f"{own}.{expert}.{names.up}.weight"])
            assert torch.equal(stacked[f"{prefix}.down_proj"][expert], stored[f"{own}.{expert}.{names.down}.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("layouts", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_of_a_mixture_trains_and_goes_on_alike(
    kind: str, layouts: tuple[str, ...], replays: bool, tmp_path: Path
) -> None:
    resumes = tuple(zip(layouts, (*layouts[1:], layouts[0]), strict=True))
    recompute: Recompute = "full" if replays else "none"
    scene = make_scene(kind, tmp_path, dict.fromkeys(layouts, recompute), resumes, replays=replays)
    for layout in layouts:
        assert_trained_alike(scene, layout)
    for before, after in resumes:
        assert_goes_on_alike(scene, before, after)


# --- grouped products of experts ------------------------------------------------------------------------------------


def test_matrices_of_a_model_that_is_trained_are_not_copied(tmp_path: Path) -> None:
    play(look_at_matrices, tmp_path, world_size=1, directory=tmp_path)


def look_at_matrices(_: ParallelContext, directory: Path) -> None:
    engine = make_megatron(save_tiny_mixture("qwen3_moe", directory / "model"), ParallelContext(), Variant())
    found = [module for module in engine._trainee.modules() if isinstance(module, GroupedExperts)]
    assert len(found) == 2
    for module in found:
        for name in ("linear_fc1", "linear_fc2"):
            matrices: list[Tensor] = module.matrices(name)
            assert as_one(matrices).data_ptr() == matrices[0].data_ptr()


def test_a_layer_that_was_computed_again_is_held_by_nothing(tmp_path: Path) -> None:
    play(look_for_graphs, tmp_path, world_size=1, directory=tmp_path)


def look_for_graphs(_: ParallelContext, directory: Path) -> None:
    variant = Variant(recompute="full")
    engine = make_megatron(save_tiny_mixture("qwen3_moe", directory / "model"), ParallelContext(), variant)
    engine.train_batch(make_sample([[8, 8]]), loss_fn=lm_loss, counted="prompt_mask")
    modules: list[Any] = list(engine._trainee.modules())
    dispatchers = [module.token_dispatcher for module in modules if hasattr(module, "token_dispatcher")]
    assert len(dispatchers) == 2
    for dispatcher in dispatchers:
        assert isinstance(dispatcher, MoETokenDispatcher)
        kept = [value for value in vars(dispatcher).values() if isinstance(value, Tensor)]
        assert kept and all(value.numel() <= 16 and not value.requires_grad for value in kept)
