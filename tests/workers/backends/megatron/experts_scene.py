"""A tiny mixture of experts, trained in trainer groups of several layouts, and by a plain loop over transformers.

recorded(tokens)   where each token is said to have gone: hardly ever where the router itself would send it
play_experts       rank by rank: one step, its state, two more; then steps 2 and 3 from another layout's state
forced_loop        transformers, one answer after the other, its routers told the same
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.utils import logging as transformers_logging

from corral.experiments.config.model import Recompute
from corral.experiments.inputs.decoder_config import decoder_sizes
from corral.scheduling.keys import routed_experts_key
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.backends.megatron.engine import MegatronEngine
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.layout_scene import (
    NUM_STEPS,
    SAVED_AFTER,
    Stats,
    Variant,
    answers_of,
    batch,
    plain_loop,
    train,
)
from tests.workers.backends.megatron_scene import make_megatron
from tests.workers.backends.training_helpers import VOCAB_SIZE, read_weights

NUM_EXPERTS, TOP_K = 4, 2
PROMPT = torch.tensor([[3, 5, 8, 13, 21, 34]])
_PAIRS = torch.tensor([[a, b] for a in range(NUM_EXPERTS) for b in range(NUM_EXPERTS) if a != b], dtype=torch.int16)


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_QWEN: dict[str, Any] = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 16}
KINDS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, **_QWEN, num_hidden_layers=2, head_dim=8, norm_topk_prob=True),
    # The first layer dense; of two stages the first one, too, has no experts.
    "mixed": lambda: Qwen3MoeConfig(
        **_SIZES, **_QWEN, num_hidden_layers=2, head_dim=8, norm_topk_prob=True, decoder_sparse_step=2
    ),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_hidden_layers=2, num_local_experts=NUM_EXPERTS),
    "shared": lambda: Qwen2MoeConfig(
        **_SIZES, **_QWEN, num_hidden_layers=2, shared_expert_intermediate_size=24, norm_topk_prob=False
    ),
    "mixed and shared": lambda: Qwen2MoeConfig(
        **_SIZES,
        **_QWEN,
        num_hidden_layers=4,
        shared_expert_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[1, 2],
        qkv_bias=False,
    ),
}
"""Mixtures of each kind that the backend knows."""


def save_tiny_mixture(kind: str, directory: Path) -> Path:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(KINDS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():  # routers that choose, and norms that differ
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


def num_sparse_layers(model: Path) -> int:
    """Its layers with experts."""
    sizes = decoder_sizes(model)
    assert sizes is not None
    return len(sizes.sparse_layers)


def recorded(tokens: Tensor, positions: Tensor, *, num_layers: int) -> Tensor:
    """[T, layers, k] int16: some pair of experts for each token in each layer, and none for every fifth token."""
    layers = torch.arange(num_layers)
    pairs = _PAIRS[(7 * tokens[:, None] + 3 * positions[:, None] + 5 * layers) % len(_PAIRS)]
    is_unknown = (tokens + positions) % 5 == 0
    return torch.where(is_unknown[:, None, None], torch.tensor(-1, dtype=torch.int16), pairs)


def batch_with_experts(step: int, *, num_layers: int) -> SequenceSample:
    """The batch of a step, as a generator gives it that says where each token went."""
    sample = batch(step)
    experts = [
        recorded(tokens, torch.arange(len(tokens)), num_layers=num_layers).flatten() for tokens, _ in answers_of(sample)
    ]
    return sample.with_key(routed_experts_key(num_layers=num_layers, top_k=TOP_K), torch.cat(experts).numpy())


def make_engine(model: Path, context: ParallelContext, recompute: Recompute) -> MegatronEngine:
    return make_megatron(model, context, Variant(recompute=recompute))


def play_experts(
    world: ParallelContext,
    model: Path,
    layouts: Mapping[str, Recompute],
    resumes: Sequence[tuple[str, str]],
    directory: Path,
    replays: bool,
) -> None:
    """What one rank does.

    Args:
        layouts: which of its layers' results each computes again in the backward pass.
        resumes: (layout that saved, layout that goes on) of each resumption.
        replays: whether samples say where their tokens went.
    """
    meshes = {layout: _mesh_of(layout) for layout in ("d1", *layouts)}
    contexts = mesh_contexts(world, meshes)
    make = partial(batch_with_experts, num_layers=num_sparse_layers(model)) if replays else batch
    seen: dict[str, Any] = {}
    for layout, recompute in layouts.items():
        context = contexts[layout]
        if context is not None:
            seen[layout] = _train_and_save(make_engine(model, context, recompute), make, directory / layout)
    dist.barrier(group=world.group)  # what one layout has saved, ranks of another one read
    for before, after in resumes:
        context = contexts[after]
        if context is not None:
            engine = make_engine(model, context, "none")
            engine.load_state(directory / before / "state")
            seen[f"{before}>{after}"] = train(engine, range(SAVED_AFTER, NUM_STEPS), make=make)
    alone = contexts["d1"]
    if alone is not None:
        engine = make_engine(model, alone, "none")
        engine.import_weights(read_weights(directory / next(iter(layouts)) / "weights").items())
        logits = engine.model(input_ids=PROMPT).logits.detach()
        save_file({"logits": logits.contiguous()}, directory / "logits.safetensors")
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(seen))


def _mesh_of(layout: str) -> Mesh:
    dims = ParallelDims.parse(layout)
    return Mesh(ranks=tuple(range(dims.world_size)), dims=dims)


def _train_and_save(engine: MegatronEngine, make: Callable[[int], SequenceSample], directory: Path) -> Stats:
    stats = train(engine, range(SAVED_AFTER), make=make)
    engine.state_shard().write(directory / "state")
    stats += train(engine, range(SAVED_AFTER, NUM_STEPS), make=make)
    engine.import_weights(engine.export_weights())  # as models of any backend give them to each other
    engine.save_weights(directory / "weights")
    return stats


def forced_loop(model: Path, *, replays: bool) -> tuple[Any, Stats, dict[str, Tensor]]:
    """The trained model, what it said of each step, and the gradients of the first one by parameter."""
    gradients: dict[str, Tensor] = {}

    def force(whole: Any, tokens: Tensor) -> None:
        sparse = [layer for layer in whole.model.layers if hasattr(layer.mlp, "gate")]
        experts = recorded(tokens, torch.arange(len(tokens)), num_layers=len(sparse))
        normalizes = getattr(whole.config, "norm_topk_prob", True)
        for number, layer in enumerate(sparse):
            layer.mlp.gate.forward = _ForcedGate(layer.mlp.gate, experts[:, number].long(), normalizes=normalizes)

    def keep(step: int, whole: Any) -> None:
        if step == 0:
            gradients.update({name: parameter.grad.clone() for name, parameter in whole.named_parameters()})

    trained, stats = plain_loop(model, before_answer=force if replays else lambda *_: None, before_step=keep)
    return trained, stats, gradients


class _ForcedGate:
    """A router of transformers that is told where the tokens go, and weighs the experts by its own probabilities."""

    def __init__(self, gate: Any, experts: Tensor, *, normalizes: bool) -> None:
        self._gate = gate
        self._experts = experts
        self._normalizes = normalizes

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self._gate.weight.T
        probabilities = logits.softmax(-1)
        rows = [
            own if int(told[0]) < 0 else told
            for own, told in zip(probabilities.topk(TOP_K).indices, self._experts, strict=True)
        ]
        chosen = torch.stack(rows)
        weights = probabilities.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) if self._normalizes else weights, chosen
