"""A tiny mixture, samples that say which experts to choose, and a plain loop over transformers that is forced to."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

from corral.scheduling.keys import ROUTED_EXPERTS, routed_experts_key
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.algorithms.base import compute_logprobs
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.training_helpers import VOCAB_SIZE, make_sample, optimizer_config, tiny_engine
from tests.workers.engine.tiny_models import generate_greedily
from tests.workers.some_samples import some_of

LENGTHS = [[5, 17, 9], [30, 4, 4], [3, 12]]
NUM_STEPS = 3
NUM_EXPERTS, TOP_K = 6, 2
EXPERT_LAYERS = [0, 2]  # a dense one between them
GREEDY_PROMPTS = [[3, 5, 8], [13, 21]]
OPTIMIZER = optimizer_config(lr=2e-3, eps=1e-3)  # near 0, Adam makes large steps of small differences


def save_tiny_mixture(directory: Path, *, num_experts: int = NUM_EXPERTS) -> Path:
    """A random Qwen3-MoE."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=64,
        num_experts=num_experts,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


def routed_batch(step: int) -> SequenceSample:
    """Answers whose experts were drawn at random; the last token of each, and one answer's beginning, say nothing."""
    sample = make_sample(LENGTHS, seed=step)
    rng = np.random.default_rng([step, 7])
    lengths = sample.answer_lengths()
    rows = rng.permuted(np.tile(np.arange(NUM_EXPERTS), (sum(lengths), len(EXPERT_LAYERS), 1)), axis=2)[..., :TOP_K]
    rows[np.cumsum(lengths) - 1] = -1
    rows[lengths[0] : lengths[0] + 4] = -1
    key = routed_experts_key(num_layers=len(EXPERT_LAYERS), top_k=TOP_K)
    return sample.with_key(key, rows.astype(np.int16).reshape(-1))


def rows_of(sample: SequenceSample) -> list[npt.NDArray[np.int16]]:
    """[tokens, layers, k] of each answer."""
    rows = sample.data[ROUTED_EXPERTS].reshape(-1, len(EXPERT_LAYERS), TOP_K)
    return np.split(rows, np.cumsum(sample.answer_lengths())[:-1])


@contextmanager
def forced(model: Any, rows: npt.NDArray[np.int16]) -> Iterator[None]:
    """Make transformers' own routers choose these experts, token by token, for one sequence."""

    def hook_of(number: int) -> Any:
        def choose(module: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, _, experts = outputs
            experts = experts.clone()
            for token, told in enumerate(rows[:, number]):
                if told[0] >= 0:
                    experts[token] = torch.tensor(told.astype(np.int64))
            exponentials = logits.float().gather(1, experts).exp()
            return logits, exponentials / exponentials.sum(1, keepdim=True), experts

        return choose

    gates = [model.model.layers[layer].mlp.gate for layer in EXPERT_LAYERS]
    hooks = [gate.register_forward_hook(hook_of(number)) for number, gate in enumerate(gates)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def plain_logprobs(model: Any, sample: SequenceSample) -> list[Tensor]:
    """Of the response tokens of each answer, with gradient, by the experts of the sample."""
    logprobs = []
    lengths = sample.answer_lengths()
    tokens = torch.split(torch.as_tensor(sample.data["input_ids"]).long(), lengths)
    masks = torch.split(torch.as_tensor(sample.data["prompt_mask"]), lengths)
    for ids, mask, rows in zip(tokens, masks, rows_of(sample), strict=True):
        with forced(model, rows):
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
        logprobs.append(torch.log_softmax(logits, -1).gather(1, ids[1:, None])[int(mask.sum()) - 1 :, 0])
    return logprobs


def plain_loop(directory: Path) -> tuple[Any, list[float]]:
    """The trained model, and the norm of the gradient of each step."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    decays = [[p for n, p in model.named_parameters() if ("norm" not in n) is does] for does in (True, False)]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in zip(decays, (OPTIMIZER.weight_decay, 0.0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    norms = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        (-torch.cat(plain_logprobs(model, routed_batch(step))).mean()).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
    return model, norms


make_engine = partial(tiny_engine, optimizer=OPTIMIZER, max_tokens=40)


def share_of(sample: SequenceSample, context: ParallelContext) -> SequenceSample:
    """What one data-parallel rank has of a batch."""
    return some_of(sample, sample.uids[context.dp_rank :: context.mesh.dims.dp])


def train(engine: FSDPEngine, directory: Path) -> list[float]:
    """The norm of the gradient of each step; the weights are written."""
    actor = SFTInterface()
    norms = [
        actor.train_step(engine, share_of(routed_batch(step), engine.context), version=step)["train/grad_norm"]
        for step in range(NUM_STEPS)
    ]
    engine.save_weights(directory)
    return norms


def play_layouts(world: ParallelContext, model: Path, layouts: Sequence[str], directory: Path) -> None:
    """What one rank does: training in each layout, one after the other."""
    meshes = {layout: Mesh(ranks=(0, 1), dims=ParallelDims.parse(layout)) for layout in layouts}
    seen: dict[str, Any] = {}
    for layout, context in mesh_contexts(world, meshes).items():
        assert context is not None
        engine = make_engine(model, context)
        own = share_of(routed_batch(0), context)
        seen[layout] = {
            "logprobs": compute_logprobs(engine, own).tolist(),
            "norms": train(engine, directory / layout),
            "dp_rank": context.dp_rank,
            "generated": generate_greedily(engine.model, GREEDY_PROMPTS, max_new_tokens=6),
        }
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(seen))
