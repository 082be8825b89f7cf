"""Whether a model computes the same of sequences in one packed row as of each alone, tried when it is loaded.

    one row of 7 + 12 tokens ── as in training ─────────────────────────────► hidden states ┐ equal but for rounding?
    each alone ── the model's own attention, whose masks it makes itself ───► hidden states ┘ else the kind is refused

Nothing in a model's code says that it keeps sequences apart: one hands a state on over their borders, another one gives
attention a mask that a packed row has no place for, and both go on learning from wrong numbers. So it is measured.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from corral.scheduling.keys import KeyLayout
from corral.workers.backends.context_parallel import cut_row
from corral.workers.backends.heads import Head
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.sharding import reshard
from corral.workers.data.sequence_sample import SequenceSample

_LENGTHS: Final = (7, 12)
_STRIDE: Final = 7919  # a prime: ids that are far apart, in any vocabulary that it does not divide
_CHUNK: Final = 4
"""Tokens of a chunk while it is tried, in models whose attention sees no other chunk: real ones are too long to try."""
_BOUND: Final = 1e-3
"""Part of a hidden state's size, in float32: 45 healthy kinds with 4 layers are apart by 1e-6 at most, faulty ones by
0.01 and more (measured); depth adds roundings up."""
_ROUNDING: Final = 3.0
"""In bfloat16 two ways to compute attention are apart by 0.0002 to 0.04 (4 to 48 layers): that distance is measured
with the model, and counts this often. Healthy kinds were apart by less than a tenth of it on a CPU, where packed rows
are computed in the same way as others; on a GPU another kernel computes them, which makes one such distance."""


@torch.no_grad()
def refuse_unless_packed_alike(
    model: Any,
    head: Head,
    scores_of: Callable[[MicroBatch], Any],
    *,
    context: ParallelContext,
    compute_dtype: torch.dtype,
) -> None:
    """Compare hidden states of the same tokens; a collective of the mesh, with the same answer on all of its ranks.

    Guarantee: weights, gradients and random numbers stay as they are, and what was gathered is let go.

    Args:
        scores_of: what training makes of this rank's part of a row.

    Raises:
        ValueError: if they differ by more than rounding explains, or the model fails.
    """
    kind = f"a model of the kind {model.config.model_type!r}"
    try:
        with torch.random.fork_rng([context.device] if context.device.type == "cuda" else []):
            apart, bound = _measure(model, head, scores_of, context, is_exact=compute_dtype == torch.float32)
    except (dist.DistError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any model's code
        raise ValueError(
            f"{kind} fails on two sequences in one packed row ({type(error).__name__}: {error}), and the fsdp backend "
            "computes no other rows; use a kind whose attention transformers lets others compute, as qwen3 or llama"
        ) from error
    if apart > bound:
        raise ValueError(
            f"{kind} computes other numbers for sequences in one packed row than for each alone: hidden states are "
            f"{apart:.2g} of their size apart, and rounding in {str(compute_dtype).removeprefix('torch.')} explains "
            f"{bound:.2g}. The fsdp backend computes packed rows only; use a kind whose layers keep sequences apart, "
            "such as qwen3 or llama"
        )


def _measure(
    model: Any, head: Head, scores_of: Callable[[MicroBatch], Any], context: ParallelContext, *, is_exact: bool
) -> tuple[float, float]:
    """How far hidden states are apart, as a part of their size, and how far they may be; means over the mesh."""
    ids = (np.arange(1, 1 + sum(_LENGTHS)) * _STRIDE % model.config.vocab_size).astype(np.int32)
    sample = SequenceSample.from_group("packed", {"input_ids": np.split(ids, [_LENGTHS[0]])})
    row, *sequences = make_micro_batches(sample, [[0, 1], [0], [1]], count=3, device=context.device)
    part = cut_row(row, rank=context.coords.cp_rank, num_ranks=context.mesh.dims.cp)
    layout = KeyLayout.PER_TOKEN if head.has_score_layer else KeyLayout.PER_SHIFTED_TOKEN
    alone: dict[str, list[Tensor]] = {}
    model.eval()
    try:
        with _inputs_of_last_layer(model, head) as seen, _set_for_now(model.config, "attention_chunk_size", _CHUNK):
            scores_of(part.micro_batch)
            packed = part.join(seen.pop(), layout, context.cp_group)
            for own_attention in ("sdpa",) if is_exact else ("sdpa", "eager"):
                with _set_for_now(model.config, "_attn_implementation", own_attention):
                    for sequence in sequences:
                        scores_of(sequence)
                alone[own_attention] = [seen.pop() for _ in sequences][::-1]
    finally:
        reshard(model)
    reference = alone["sdpa"]
    apart = {"apart": _distance(torch.split(packed, [len(states) for states in reference]), reference)}
    apart["rounding"] = 0.0 if is_exact else _distance(alone["eager"], reference)
    total, num_ranks = context.sum_over_mesh(apart), context.mesh.dims.world_size
    return total["apart"] / num_ranks, _BOUND + _ROUNDING * total["rounding"] / num_ranks


def _distance(states: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Of the token in the middle of the sequence that differs more: a router sends single ones to other experts."""
    return max(
        float((torch.linalg.vector_norm(own - other, dim=1) / torch.linalg.vector_norm(other, dim=1)).median())
        for own, other in zip(states, reference, strict=True)
    )


@contextmanager
def _inputs_of_last_layer(model: Any, head: Head) -> Iterator[list[Tensor]]:
    """Hidden states [tokens, H] float32 of each forward pass within, of the tokens that are asked for."""
    seen: list[Tensor] = []
    layer = model.score if head.has_score_layer else model.get_output_embeddings()
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].float()))
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _set_for_now(config: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of what a forward pass reads in a configuration, where it has any."""
    before = getattr(config, name, None)
    if before is not None:
        setattr(config, name, value)
    try:
        yield
    finally:
        if before is not None:
            setattr(config, name, before)
