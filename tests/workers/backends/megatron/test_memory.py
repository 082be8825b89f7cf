"""What the planner says that a layer of Megatron keeps of a token, beside what autograd really keeps.

Norms keep what a GPU's kernel keeps, which torch has for GPUs alone. Of each model there are two, one with a layer
more: what the forward pass of that one leaves beyond the other's is the layer's. Ranks have the same tokens, so that
what experts are sent is the same on average over all of them, however unevenly they are chosen.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from corral.experiments.config.model import LoraConfig
from corral.experiments.inputs.decoder_config import decoder_sizes
from corral.scheduling.memory.layers import Layers
from corral.scheduling.packing import MicroBatchSpec
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.backends.megatron.engine import MegatronEngine
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import kept_bytes, make_sample, optimizer_config

TOKENS = 128
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 168,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mixture": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
    "shared": (Qwen2MoeForCausalLM, Qwen2MoeConfig, EXPERTS | {"shared_expert_intermediate_size": 28}),
}
NUM_LAYERS = (2, 3)
LORA = LoraConfig(rank=3, alpha=3.0)
ADAPTERS = 7  # of a layer


@dataclass(frozen=True)
class Case:
    """One way to train one model."""

    model: str
    layout: str
    dtype: torch.dtype
    lora: LoraConfig | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.layout} {self.dtype}{' adapters' if self.lora else ''}"


CASES = (
    Case("llama", "d1", torch.float32),
    Case("llama", "c2", torch.bfloat16),
    Case("qwen3", "c2", torch.float32),
    Case("qwen3", "t2", torch.bfloat16),
    Case("mixture", "d1", torch.bfloat16),
    Case("mixture", "t2", torch.float32),
    Case("mixture", "d2e2", torch.bfloat16),
    Case("shared", "t2", torch.bfloat16),
    Case("qwen3", "t2", torch.float32, LORA),
    Case("llama", "d1", torch.float32, LORA),
)


def save_models(directory: Path) -> None:
    for name, (model, config, traits) in MODELS.items():
        for layers in NUM_LAYERS:
            torch.manual_seed(0)
            model(config(num_hidden_layers=layers, **SIZES, **traits)).save_pretrained(directory / f"{name}-{layers}")


class FusedNorm(torch.autograd.Function):
    """torch's norm as the kernel of a GPU has it: of what it computes it keeps its input and a scale of each row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        scales = values.float().square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(values, weight, scales)
        return (values * scales * weight).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise NotImplementedError("nothing is trained here")


def look_at_ranks(world: ParallelContext, cases: Sequence[Case], directory: Path) -> None:
    torch.nn.RMSNorm.forward = lambda norm, values: FusedNorm.apply(values, norm.weight)  # type: ignore[method-assign, no-untyped-call]
    kept: dict[str, float] = {}
    for case in cases:
        dims = ParallelDims.parse(case.layout)
        context = mesh_contexts(world, {"actor": Mesh(ranks=tuple(range(dims.world_size)), dims=dims)})["actor"]
        if context is not None:
            few, many = (kept_of(case, directory / f"{case.model}-{layers}", context) for layers in NUM_LAYERS)
            kept[str(case)] = (many - few) / (NUM_LAYERS[1] - NUM_LAYERS[0])
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(kept))


def kept_of(case: Case, model: Path, context: ParallelContext) -> int:
    """Of the tensors that gradients will need of a row; one storage counts once, and what is a parameter's does not."""
    engine = MegatronEngine(
        model,
        context=context,
        optimizer=optimizer_config(),
        lora=case.lora,
        micro_batches=MicroBatchSpec(),
        compute_dtype=case.dtype,
    )
    engine._trainee.train()
    return kept_bytes(engine._trainee.parameters(), lambda: forward(engine))


def forward(engine: MegatronEngine) -> Tensor:
    pipeline = engine._pipeline
    return pipeline._stage.forward_row(pipeline._part(row()).micro_batch)


def row() -> MicroBatch:
    [micro_batch] = make_micro_batches(
        make_sample([[TOKENS // 4] * 4]), [list(range(4))], count=1, device=torch.device("cpu")
    )
    return micro_batch


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kept")
    save_models(directory)
    play(look_at_ranks, CASES, directory, world_size=2, directory=directory)
    return directory


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_layer_keeps_is_what_is_planned_for(case: Case, directory: Path) -> None:
    sizes, dims = decoder_sizes(directory / f"{case.model}-2"), ParallelDims.parse(case.layout)
    assert sizes is not None
    compute_bytes = case.dtype.itemsize
    layers = Layers(
        sizes=sizes, backend="megatron", dims=dims, compute_bytes=compute_bytes, trains_weights=case.lora is None
    )
    of_token = layers.works_in(0)
    if case.lora is not None:
        of_token += ADAPTERS * layers.of_adapter("", (), rank=case.lora.rank, recompute="none")
    seen = [json.loads((directory / f"rank-{rank}.json").read_text())[str(case)] for rank in range(dims.world_size)]
    bounds = 4 * sizes.num_experts // dims.ep  # where the tokens of each expert end, once for all
    assert mean(seen) == of_token * TOKENS / dims.cp + bounds
