"""AdamW and Muon: beside closed forms and plain loops in float64, and whatever the number of ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from corral.experiments.config.model import OptimizerConfig
from corral.workers.algorithms.base import response_mask
from corral.workers.backends.base import LossOutput, TokenScores
from corral.workers.backends.files.weights import as_stored
from corral.workers.backends.fsdp import optimizers
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.fsdp.optimizers import orthogonalized
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.replay_scene import save_tiny_mixture
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import (
    load_reference,
    make_sample,
    optimizer_config,
    read_weights,
    tiny_engine,
)
from tests.workers.some_samples import some_of

LENGTHS = [[5, 17, 9], [30, 4, 4], [3, 12]]
NUM_STEPS = 3
LR = 1e-3
MUON = {"type": "muon"}


def make_engine(directory: Path, context: ParallelContext | None = None, **overrides: Any) -> FSDPEngine:
    config = OptimizerConfig.model_validate(optimizer_config(lr=LR).model_dump() | overrides)
    return tiny_engine(directory, context, optimizer=config)


def sample_of(step: int, context: ParallelContext | None = None) -> SequenceSample:
    sample = make_sample(LENGTHS, seed=step)
    if context is not None:
        mine = [uid for number, uid in enumerate(sample.uids) if number % context.mesh.dims.dp == context.dp_rank]
        sample = some_of(sample, mine)
    return sample.with_key("loss_mask", response_mask(sample))


def likelihood(scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
    return LossOutput(-(scores.logprobs * micro_batch.tensors["loss_mask"]).sum())


def nothing(scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
    return LossOutput(scores.logprobs.sum() * 0.0)


def by_singular_values(matrix: Tensor, *, steps: int) -> Tensor:
    """Newton-Schulz in closed form: each singular value, relative to the norm of all, goes through the quintic."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), steps=st.integers(1, 6), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_orthogonalization_maps_the_singular_values_alone(rows: int, columns: int, steps: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    expected = by_singular_values(matrix, steps=steps)
    np.testing.assert_allclose(orthogonalized(matrix.double(), steps=steps), expected, atol=1e-4)
    np.testing.assert_allclose(orthogonalized(matrix, steps=steps), expected, atol=5e-3)


def test_five_steps_make_nearly_orthogonal_matrices_of_any_scale() -> None:
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    for scale in (1e-4, 1.0, 1e6):
        values = torch.linalg.svdvals(orthogonalized(matrix * scale, steps=5))
        assert 0.6 < float(values.min()) and float(values.max()) < 1.25
    assert not orthogonalized(torch.zeros(3, 4), steps=5).any()


def plain_adamw(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int, decay: float) -> None:
    config = optimizer_config()
    state["m"] = config.betas[0] * state.get("m", torch.zeros_like(gradient)) + (1 - config.betas[0]) * gradient
    state["v"] = config.betas[1] * state.get("v", torch.zeros_like(gradient)) + (1 - config.betas[1]) * gradient**2
    m, v = state["m"] / (1 - config.betas[0] ** (step + 1)), state["v"] / (1 - config.betas[1] ** (step + 1))
    parameter -= LR * (m / (v.sqrt() + config.eps) + decay * parameter)


def plain_muon(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], decay: float) -> None:
    state["m"] = 0.95 * state.get("m", torch.zeros_like(gradient)) + 0.05 * gradient
    update = 0.95 * state["m"] + 0.05 * gradient
    size = 0.2 * max(update.shape) ** 0.5
    parameter -= LR * (size * by_singular_values(update, steps=5) + decay * parameter)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_steps_equal_a_plain_loop_in_float64(kind: str, model_directory: Path) -> None:
    engine = make_engine(model_directory, weight_decay=0.3, type=kind)

    model = load_reference(model_directory).double()
    states: dict[str, dict[str, Tensor]] = {name: {} for name, _ in model.named_parameters()}
    for step in range(NUM_STEPS):
        engine.train_batch(sample_of(step), loss_fn=likelihood)
        sample = sample_of(step)
        ends = np.cumsum(sample.answer_lengths())[:-1]
        answers = [torch.as_tensor(ids).long() for ids in np.split(np.asarray(sample.data["input_ids"]), ends)]
        table = [model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1) for ids in answers]
        logprobs = torch.cat([rows.gather(1, ids[1:, None])[:, 0] for rows, ids in zip(table, answers, strict=True)])
        mask = torch.as_tensor(sample.data["loss_mask"])
        model.zero_grad()
        torch.autograd.backward(-(logprobs * mask).sum() / mask.sum())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                decay = 0.3 if parameter.ndim == 2 else 0.0
                if kind != "adamw" and parameter.ndim == 2 and ".layers." in name:
                    plain_muon(parameter, parameter.grad, states[name], decay)
                else:
                    plain_adamw(parameter, parameter.grad, states[name], step, decay)
    expected = dict(model.named_parameters())
    for name, tensor in engine.export_weights():
        np.testing.assert_allclose(tensor, expected[name].detach(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_without_a_gradient_matrices_decay_and_vectors_do_not(kind: str, model_directory: Path) -> None:
    engine = make_engine(model_directory, type=kind, weight_decay=0.5)
    before = read_weights(model_directory)
    engine.train_batch(sample_of(0), loss_fn=nothing)
    kept = {"layer norm": False, "bias": False, "matrix": False}
    for name, tensor in engine.export_weights():
        decays = before[name].ndim == 2
        np.testing.assert_allclose(tensor, before[name] * (1 - LR * 0.5 if decays else 1.0), rtol=1e-6, err_msg=name)
        kept["layer norm" if "norm" in name else "bias" if "bias" in name else "matrix"] = True
    assert all(kept.values())  # there was one of each kind


def play_rank(world: ParallelContext, model_directory: Path, directory: Path) -> None:
    engine = make_engine(model_directory, world, **MUON)
    seen: list[tuple[int, ...]] = []
    orthogonalize = optimizers.orthogonalized

    def orthogonalized_and_seen(matrix: Tensor, *, steps: int) -> Tensor:
        seen.append(tuple(matrix.shape))
        return orthogonalize(matrix, steps=steps)

    optimizers.orthogonalized = orthogonalized_and_seen
    for step in range(NUM_STEPS):
        engine.train_batch(sample_of(step, world), loss_fn=likelihood)
        engine.state_shard().write(directory / f"state-{step}")
    engine.save_weights(directory / "two-ranks")
    cuts = {name: str(p.placements) for name, p in engine.model.named_parameters() if isinstance(p, DTensor)}
    (directory / f"cuts-{world.rank}.json").write_text(json.dumps(cuts))
    (directory / f"seen-{world.rank}.json").write_text(json.dumps(seen))


@pytest.mark.parametrize(("num_experts", "cut"), [(4, 0), (3, 1)])
def test_muon_makes_the_same_weights_on_one_rank_and_on_two_and_resumes_on_either(
    num_experts: int, cut: int, tmp_path: Path
) -> None:
    """Each rank has two of four experts, and a part of each of three."""
    model_directory = save_tiny_mixture(tmp_path / "mixture", num_experts=num_experts)
    play(play_rank, model_directory, tmp_path, world_size=2, directory=tmp_path)
    cuts = json.loads((tmp_path / "cuts-0.json").read_text())
    assert {at for name, at in cuts.items() if ".experts." in name} <= {f"(Shard(dim={cut}),)"}
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    single = [[shape for shape in of_rank if len(shape) == 2] for of_rank in seen]  # matrices that are no expert's
    layers = [f".layers.{layer}." for layer in range(3)]
    names = [n for n, t in read_weights(model_directory).items() if t.ndim == 2 and any(layer in n for layer in layers)]
    alone = [name for name in names if ".experts." not in name]
    assert sum(map(len, single)) == NUM_STEPS * len(alone) and abs(len(single[0]) - len(single[1])) <= NUM_STEPS
    two_ranks = read_weights(tmp_path / "two-ranks")
    whole, resumed = make_engine(model_directory, **MUON), make_engine(model_directory, **MUON)
    resumed.load_state(tmp_path / "state-1")
    assert resumed.step == 2
    for step in range(NUM_STEPS):
        for engine in (whole, resumed) if step == 2 else (whole,):
            engine.train_batch(sample_of(step), loss_fn=likelihood)
    for engine in (whole, resumed):
        for name, tensor in as_stored(engine.model, engine.export_weights(), dtype=torch.float32):
            np.testing.assert_allclose(tensor, two_ranks[name], atol=1e-5, err_msg=name)


def test_muon_takes_each_matrix_of_an_expert_by_itself(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_mixture(tmp_path), weight_decay=0.0, **MUON)
    weights = {name: p for name, p in engine.model.named_parameters() if ".experts." in name}
    before = {name: p.detach().clone() for name, p in weights.items()}
    gradients: dict[str, Tensor] = {}
    optimizer = engine._optimizer
    step = optimizer.step

    def look_and_step() -> None:
        gradients.update({name: p.grad.clone() for name, p in weights.items() if p.grad is not None})
        step()

    optimizer.step = look_and_step
    engine.train_batch(sample_of(0), loss_fn=likelihood)
    assert len(gradients) == 4
    for name, stacked in gradients.items():
        for expert, gradient in enumerate(stacked):
            matrices = gradient.chunk(2) if "gate_up" in name else (gradient,)
            sizes = [LR * 0.2 * max(matrix.shape) ** 0.5 for matrix in matrices]
            moved = [size * by_singular_values(m, steps=5) for size, m in zip(sizes, matrices, strict=True)]
            expected = before[name][expert] - torch.cat(moved)
            np.testing.assert_allclose(weights[name].detach()[expert], expected, atol=1e-5, err_msg=name)


def test_muon_in_bfloat16_stays_near(model_directory: Path) -> None:
    config = OptimizerConfig.model_validate(optimizer_config(lr=LR).model_dump() | {"type": "muon"})
    exact = make_engine(model_directory, type="muon")
    rounded = tiny_engine(model_directory, optimizer=config, compute_dtype=torch.bfloat16)
    start = read_weights(model_directory)
    for engine in (exact, rounded):
        engine.train_batch(sample_of(0), loss_fn=likelihood)
    expected = dict(exact.export_weights())
    name = "model.layers.0.mlp.up_proj.weight"
    moved, also_moved = expected[name] - start[name], dict(rounded.export_weights())[name] - start[name]
    assert also_moved.dtype == torch.float32
    assert float(torch.nn.functional.cosine_similarity(moved.flatten(), also_moved.flatten(), dim=0)) > 0.98
