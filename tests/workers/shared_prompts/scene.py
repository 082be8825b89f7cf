"""Groups of answers that begin with their prompt, and engines that compute it once for all, or for each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corral.experiments.config.algorithm import PPOConfig
from corral.scheduling.packing import MicroBatchSpec
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.training_helpers import VOCAB_SIZE, make_sample, optimizer_config

PROMPTS = [9, 30, 5, 1, 14]
ANSWERS = [[3, 8, 8, 2, 15], [6], [20, 4, 4], [7, 7], [1, 12, 5, 9]]
"""Tokens of each answer after its prompt: ragged; one prompt has one answer, one is a single token."""
NUM_STEPS = 4
PPO = PPOConfig(eps_clip=0.05, c_clip=2.0, is_ratio_clip=1.2, loss_reduction="answer_mean")
LAYOUTS = {"d2": True, "t2": True, "c2": False}
"""Of two ranks, and whether they share prompts."""
NUM_STEPS_OF_LAYOUTS = 2


def grouped_batch(
    step: int, *, prompts: Sequence[int] = PROMPTS, answers: Sequence[Sequence[int]] = ANSWERS
) -> SequenceSample:
    """Random groups with all that a PPO actor reads; the answers of a group begin with the same random prompt. Those of
    odd steps have temperatures of their own."""
    parts = []
    rng = np.random.default_rng([step, 11])
    for number, (prompt, own) in enumerate(zip(prompts, answers, strict=True)):
        group = make_sample([[prompt + length for length in own]], prompt_length=prompt, seed=100 * step + number)
        ids = np.split(group.data["input_ids"].copy(), np.cumsum(group.answer_lengths())[:-1])
        beginning = rng.integers(0, VOCAB_SIZE, prompt)
        for answer in ids:
            answer[:prompt] = beginning
        parts.append(
            SequenceSample([f"0:{number}"], group.seqlens, group.data | {"input_ids": np.concatenate(ids)}, group.specs)
        )
    sample = SequenceSample.gather(parts)
    if step % 2 == 0:
        return sample
    of_prompts = 0.7 + 0.3 * np.arange(len(parts))
    return sample.with_key("temperatures", np.repeat(of_prompts, sample.num_answers_per_sample()).astype(np.float32))


def make_engine(
    directory: Path,
    *,
    shares_prompts: bool,
    context: ParallelContext | None = None,
    max_tokens: int | None = 64,
    **settings: Any,
) -> FSDPEngine:
    """A trainable engine with a rate that moves a tiny model visibly."""
    return FSDPEngine(
        directory,
        **{"context": context or ParallelContext(), "optimizer": optimizer_config(eps=1e-4), "total_steps": 100}
        | settings,
        micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=max_tokens, shares_prompts=shares_prompts),
    )


def num_computed(engine: FSDPEngine, sample: SequenceSample) -> int:
    """Tokens that the model is given for the scores of a sample, on all ranks that share its rows."""
    with counted_tokens(engine) as counts:
        engine.forward(sample)
    return sum(counts)


@contextmanager
def counted_tokens(engine: FSDPEngine) -> Iterator[list[int]]:
    """Tokens of each row that the model is given meanwhile, on all ranks that share it."""
    counts: list[int] = []

    def add(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        counts.append(inputs[0].numel() * engine.context.mesh.dims.cp)

    hook = engine.model.get_submodule("model.embed_tokens").register_forward_pre_hook(add)
    yield counts
    hook.remove()


def shares(engine: FSDPEngine, sample: SequenceSample) -> bool:
    """Whether it is given fewer tokens than the answers have."""
    return num_computed(engine, sample) < sum(sample.answer_lengths())


def train_actor(engine: FSDPEngine, *, num_steps: int = NUM_STEPS) -> list[dict[str, float]]:
    """Statistics of the steps of a PPO actor, on this rank's share of the prompts."""
    actor, context = PPOActorInterface(PPO), engine.context
    batches = [grouped_batch(step) for step in range(num_steps)]
    own = [SequenceSample.gather(batch.unpack()[context.dp_rank :: context.mesh.dims.dp]) for batch in batches]
    return [actor.train_step(engine, batch, version=step) for step, batch in enumerate(own)]


def train_in_layouts(world: ParallelContext, model: Path, directory: Path) -> dict[str, Any]:
    """What one of two ranks sees of an engine that is to share prompts; the weights are written."""
    meshes = {layout: Mesh(ranks=(0, 1), dims=ParallelDims.parse(layout)) for layout in LAYOUTS}
    seen: dict[str, Any] = {}
    for layout, context in mesh_contexts(world, meshes).items():
        assert context is not None
        engine = make_engine(model, shares_prompts=True, context=context)
        stats = train_actor(engine, num_steps=NUM_STEPS_OF_LAYOUTS)
        seen[layout] = {"stats": stats, "shares": shares(engine, grouped_batch(0))}
        engine.save_weights(directory / layout)
    return seen


def weights_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copies of all of them."""
    return {name: tensor.detach().clone() for name, tensor in engine.export_weights()}
