"""Four processes that train tiny models in every layout, and the plain loop that they are compared with.

play_layouts   rank by rank: train each model in each layout, save; then go on from what another layout has saved
plain_loop     transformers, one sequence after the other, torch.optim.AdamW: nothing of corral's
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.utils import logging as transformers_logging

from corral.experiments.config.algorithm import DPOConfig, PPOConfig
from corral.experiments.config.model import LoraConfig, Recompute
from corral.experiments.config.presets import PRESETS, fill_in
from corral.scheduling.keys import teacher_keys, teacher_prompt_key
from corral.scheduling.packing import MicroBatchSpec
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.algorithms.base import compute_logprobs, response_mask
from corral.workers.algorithms.pair_losses import PAIR_LOSSES
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.algorithms.preferences import DPOInterface
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.algorithms.teacher import TeacherInterface
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.mesh_engine import MeshEngine
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.data.teacher_prompts import padded_prompt
from tests.workers.backends.training_helpers import VOCAB_SIZE, make_sample, optimizer_config, score_loss, value_loss
from tests.workers.engine.tiny_models import generate_greedily
from tests.workers.some_samples import some_of

NUM_STEPS = 3
SAVED_AFTER = 1
"""Steps before the state that other layouts go on from."""
OPTIMIZER = optimizer_config(lr=5e-3, weight_decay=0.1, gradient_clipping=0.5)
LENGTHS = [[5, 17, 9], [30, 4, 4], [3, 12], [20, 8, 21, 6]]  # ragged, and odd in sum
PAIRS = [[5, 17], [30, 4], [3, 12], [10, 8, 11, 6]]
_OF_A_STEP = (
    "ppo/loss",
    "dpo/loss",
    "train/grad_norm",
    "train/tokens",
)  # others are of a sample of each rank's answers
_RANKS = {"d2": (2, 3)}  # others take all four, or as many as they need


@dataclass(frozen=True)
class Variant:
    """Another way to train than a language model's whole weights by AdamW."""

    head: str = "lm"
    muon: bool = False
    lora: LoraConfig | None = None
    recompute: Recompute = "none"
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-4
    top_k: int = 0
    """Above 0 by distillation over so many tokens."""
    by_all: bool = False
    """A step by every algorithm and every loss of pairs that ships, one after the other."""


Stats = list[dict[str, float]]
MakeEngine = Callable[[Path, ParallelContext, Variant], MeshEngine]
"""A backend's engine of a tiny model."""


def save_tiny(kind: str, directory: Path, *, seed: int = 1) -> Path:
    """A random model of two layers; of a deep one twelve, of an odd one three.

    The embedding of qwen3 is its output, too, and its heads are wider than their share; llama has a bias everywhere,
    and a vocabulary that two ranks cannot halve; plain_llama has neither.
    """
    is_qwen3 = kind.endswith("qwen3")
    config_class: Any = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}[kind.split("_")[-1]]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(seed)
    config = config_class(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=12 if kind.startswith("deep_") else 3 if kind.startswith("odd_") else 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 if is_qwen3 else 8,
        vocab_size=VOCAB_SIZE + (kind == "llama"),
        attention_bias=kind == "llama",
        mlp_bias=kind == "llama",
        max_position_embeddings=64,
        tie_word_embeddings=is_qwen3,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that differ from head to head
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


def mesh_of(layout: str) -> Mesh:
    """The ranks of a layout among the four; before a colon it may have a backend."""
    layout = layout.rpartition(":")[2]
    dims = ParallelDims.parse(layout)
    return Mesh(ranks=_RANKS.get(layout, tuple(range(dims.world_size))), dims=dims)


def batch(step: int) -> SequenceSample:
    return make_sample(LENGTHS, seed=step)


def share_of(sample: SequenceSample, context: ParallelContext) -> SequenceSample:
    """What one data-parallel rank has of a batch: unequal shares."""
    return some_of(sample, sample.uids[context.dp_rank :: context.mesh.dims.dp])


def make_engine(model: Path, context: ParallelContext, variant: Variant) -> FSDPEngine:
    return FSDPEngine(
        model,
        context=context,
        head=variant.head,
        optimizer=OPTIMIZER.model_copy(update={"type": "muon"}) if variant.muon else OPTIMIZER,
        lora=variant.lora,
        recompute=variant.recompute,
        total_steps=100,
        micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=48),
        compute_dtype=variant.dtype,
    )


def train(engine: MeshEngine, steps: Iterable[int], *, make: Callable[[int], SequenceSample] = batch) -> Stats:
    """Statistics of each step.

    Args:
        make: gives the batch of a step.
    """
    actor = SFTInterface()
    return [actor.train_step(engine, share_of(make(step), engine.context), version=step) for step in steps]


def play_layouts(
    world: ParallelContext,
    models: Sequence[Path],
    layouts: Mapping[str, Recompute],
    chains: Sequence[Sequence[str]],
    directory: Path,
    make: MakeEngine = make_engine,
    make_fsdp: MakeEngine = make_engine,
) -> None:
    """What one rank does.

    Args:
        layouts: with what each of them computes again.
        chains: layouts, each of which goes on from the state that the one before has saved, and saves it again before
            it does; those with `fsdp:` before them are made by `make_fsdp`.
    """
    all_layouts = dict.fromkeys([*layouts, *(layout for chain in chains for layout in chain)])
    contexts = mesh_contexts(world, {layout: mesh_of(layout) for layout in all_layouts})
    seen: dict[str, Any] = {}
    for model in models:
        for layout, recompute in layouts.items():
            context = contexts[layout]
            if context is not None:
                engine = make(model, context, Variant(recompute=recompute))
                seen[f"{model.name} {layout}"] = _train_and_save(engine, directory / model.name / layout)
    for model in models:
        for chain in chains:
            for place in range(1, len(chain)):
                dist.barrier(group=world.group)  # what one layout has saved, ranks of the next one read
                context = contexts[chain[place]]
                if context is not None:
                    make_own = make_fsdp if chain[place].startswith("fsdp:") else make
                    engine = make_own(model, context, Variant(recompute=layouts.get(chain[place], "none")))
                    before, after = (">".join(chain[:end]) for end in (place, place + 1))
                    stats = _go_on(engine, directory / model.name / before, directory / model.name / after)
                    seen[f"{model.name} {after}"] = {"stats": stats}
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(seen))


def _go_on(engine: MeshEngine, before: Path, after: Path) -> Stats:
    engine.load_state(before / "state")
    engine.state_shard().write(after / "state")
    return train(engine, range(SAVED_AFTER, NUM_STEPS))


def _train_and_save(engine: MeshEngine, directory: Path) -> dict[str, Any]:
    context = engine.context
    stats = train(engine, range(SAVED_AFTER))
    engine.state_shard().write(directory / "state")
    stats += train(engine, range(SAVED_AFTER, NUM_STEPS))
    engine.save_weights(directory / "weights")
    own = share_of(batch(NUM_STEPS), context)
    return {"stats": stats, "dp_rank": context.dp_rank, "logprobs": compute_logprobs(engine, own).tolist()}


def plain_loop(
    directory: Path,
    *,
    wrap: Callable[[Any], Any] = lambda model: model,
    before_answer: Callable[[Any, torch.Tensor], None] = lambda model, tokens: None,
    before_step: Callable[[int, Any], None] = lambda step, model: None,
) -> tuple[Any, Stats]:
    """The trained model, and of each step the mean loss and the norm of the gradient before it was clipped.

    Args:
        wrap: makes what is trained of the model.
        before_answer: is given the model and the tokens that it computes next.
        before_step: is given the number of each step and the model with its gradients, before they are clipped.
    """
    model = wrap(AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32))
    decays = [[p for p in model.parameters() if (p.ndim > 1) is does] for does in (True, False)]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in zip(decays, (OPTIMIZER.weight_decay, 0.0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    stats = []
    for step in range(NUM_STEPS):
        losses = []
        for tokens, prompt_length in answers_of(batch(step)):
            before_answer(model, tokens)
            losses.append(_losses(model, tokens, prompt_length))
        loss = torch.cat(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        before_step(step, model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.gradient_clipping)
        optimizer.step()
        stats.append({"sft/loss": loss.item(), "train/grad_norm": norm.item()})
    return model, stats


def answers_of(sample: SequenceSample) -> list[tuple[torch.Tensor, int]]:
    """Tokens of each answer, and how many of them are its prompt."""
    lengths = sample.answer_lengths()
    tokens = torch.split(torch.as_tensor(sample.data["input_ids"]).long(), lengths)
    prompts = torch.split(torch.as_tensor(sample.data["prompt_mask"]), lengths)
    return [(ids, int(mask.sum())) for ids, mask in zip(tokens, prompts, strict=True)]


def _losses(model: Any, tokens: torch.Tensor, prompt_length: int) -> torch.Tensor:
    logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1].float(), -1)
    return -logprobs.gather(1, tokens[1:, None])[prompt_length - 1 :, 0]


VARIANTS = {
    "value": Variant(head="value"),
    "scalar": Variant(head="scalar"),
    "muon": Variant(muon=True),
    "bfloat16": Variant(dtype=torch.bfloat16, tolerance=5e-2),
    "taught": Variant(top_k=3),
    "every algorithm": Variant(by_all=True),
    "lora": Variant(lora=LoraConfig(rank=2, alpha=8.0)),
    "lora of a critic": Variant(
        head="value", lora=LoraConfig(rank=2, alpha=8.0, targets=("q_proj", "v_proj", "up_proj"))
    ),
    "lora of a critic in bfloat16": Variant(
        head="value", lora=LoraConfig(rank=2, alpha=8.0), dtype=torch.bfloat16, tolerance=5e-2
    ),
    "lora with dropout": Variant(lora=LoraConfig(rank=2, alpha=8.0, dropout=0.3)),
}


def train_by_all(engine: MeshEngine) -> Stats:
    """What each algorithm and each loss of pairs has made of one engine, in turn."""
    judged, pairs = (share_of(make_sample(lengths, seed=7), engine.context) for lengths in (LENGTHS, PAIRS))
    judged = with_temperatures(judged)
    # By a policy near the engine's own, so that ratios are near 1; the critic's values are of no matter.
    near = compute_logprobs(engine, judged) + np.float32(0.3) * np.cos(judged.data["old_logprobs"] * 40)
    judged = judged.with_key("old_logprobs", np.where(response_mask(judged), near, np.float32(0.0)))
    judged = judged.with_key("teacher_logprobs", judged.data["ref_logprobs"])
    judged.data["versions"] = np.where(
        judged.data["old_logprobs"] < -4.3, -1, judged.data["versions"]
    )  # some are shown
    judged = judged.with_key("values", np.cos(judged.data["input_ids"]).astype(np.float32))
    seen = []
    for name in PRESETS:
        settings = {"algorithm": name}
        config = PPOConfig.model_validate(settings | fill_in(settings, max_new_tokens=30)[0])
        seen.append(PPOActorInterface(config).train_step(engine, judged, version=0))
    for loss in PAIR_LOSSES:
        seen.append(DPOInterface(DPOConfig.model_validate({"loss": loss})).train_step(engine, pairs, version=0))
    return [{name: value for name, value in stats.items() if name in _OF_A_STEP} for stats in seen]


def train_variant(
    variant: Variant, model: Path, context: ParallelContext, directory: Path, make: MakeEngine = make_engine
) -> dict[str, Any]:
    """Two steps, with the memory given back in between; what the model says afterwards, and its weights."""
    engine = make(model, context, variant)
    stats = train_by_all(engine) if variant.by_all else []
    for step in range(0 if variant.by_all else 2):
        sample = share_of(batch(step), context)
        if variant.top_k:
            config = PPOConfig.model_validate({"algorithm": "distillation", "distillation": {"top_k": variant.top_k}})
            stats.append(PPOActorInterface(config).train_step(engine, taught(engine, sample), version=step))
        elif variant.head == "lm":
            stats.append(SFTInterface().train_step(engine, sample, version=step))
        else:
            loss_fn, counted = {"value": (value_loss, "prompt_mask"), "scalar": (score_loss, "seq_no_eos_mask")}[
                variant.head
            ]
            stats.append(engine.train_batch(sample, loss_fn=loss_fn, counted=counted))
        engine.offload()
    engine.save_weights(directory)
    said = engine.forward(share_of(batch(2), context), top_k=variant.top_k)
    if variant.top_k:
        said |= TeacherInterface(temperature=1.0, top_k=variant.top_k).inference(
            engine, told_more(share_of(batch(2), context))
        )
    seen: dict[str, Any] = {"stats": stats, "said": {name: values.tolist() for name, values in said.items()}}
    if variant.head == "lm":  # as ranks do that generate themselves, or evaluate by answers
        seen["generated"] = generate_greedily(engine.model, [[3, 5, 8], [13, 21]], max_new_tokens=6)
    if variant.lora is None:
        follower = make(model, context, variant)
        follower.import_weights(engine.export_weights(), eta=0.5)
        follower.save_weights(directory / "blend")
    return seen


def with_temperatures(sample: SequenceSample) -> SequenceSample:
    """The sample with a temperature of each prompt's."""
    of_prompts = [0.7 + 0.3 * int(uid.rpartition(":")[2]) for uid in sample.uids]
    return sample.with_key("temperatures", np.repeat(of_prompts, sample.num_answers_per_sample()).astype(np.float32))


def taught(engine: MeshEngine, sample: SequenceSample) -> SequenceSample:
    """The sample as a teacher judges it that likes the same tokens as the engine, in proportions of its own."""
    sample = with_temperatures(sample)
    tokens = engine.forward(sample, top_k=3)["topk_ids"]
    liking = np.tile(np.log(np.array([0.5, 0.3, 0.1], np.float32)), len(tokens) // 3)
    ids, logprobs = teacher_keys(3)
    return sample.with_key(ids, tokens.astype(np.int32)).with_key(logprobs, liking)


def told_more(sample: SequenceSample) -> SequenceSample:
    """The sample with longer and shorter prompts for its teacher than those that it has."""
    prompts = [padded_prompt(range(1, 2 + answer % 7), 8) for answer in range(len(sample.answer_lengths()))]
    return sample.with_key(teacher_prompt_key(8), np.concatenate(prompts))


def play_variants(
    world: ParallelContext,
    model: Path,
    cases: Sequence[tuple[str, str]],
    directory: Path,
    make: MakeEngine = make_engine,
) -> None:
    """What one rank does of each (variant, layout)."""
    contexts = mesh_contexts(world, {layout: mesh_of(layout) for _, layout in cases})
    seen: dict[str, Any] = {}
    for name, layout in cases:
        context = contexts[layout]
        if context is not None:
            case = f"{name} {layout}"
            seen[case] = train_variant(VARIANTS[name], model, context, directory / case, make)
    dist.barrier(group=world.group)  # rank 0 has the store in which others still form groups
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(seen))
