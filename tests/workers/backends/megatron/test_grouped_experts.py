"""The matrices of a rank's experts are multiplied from where they are, and nothing outlives a step that need not."""

from pathlib import Path
from typing import Any

from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from corral.workers.backends.grouped_product import as_one
from corral.workers.backends.megatron.experts import GroupedExperts
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.layout_scene import Variant
from tests.workers.backends.megatron.experts_scene import save_tiny_mixture
from tests.workers.backends.megatron_scene import make_megatron
from tests.workers.backends.test_memory_estimates import lm_loss
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import make_sample


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
