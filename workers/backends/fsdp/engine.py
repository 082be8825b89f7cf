"""The PyTorch-native backend: a transformers model, packed forward passes, FSDP2 over data and context-parallel ranks.

micro-batch ─► row, this rank's part (c) ─► packed forward ─► scores of the whole row ─► loss ─► backward
                                                                        FSDP2 adds gradients up over the ranks ◄┘

`mesh_engine.py` describes the path of the gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from corral.experiments.config.model import LoraConfig
from corral.scheduling.keys import KeyLayout
from corral.workers.backends import train_state
from corral.workers.backends.context_parallel import cut_row
from corral.workers.backends.files.tensors import Part
from corral.workers.backends.files.weights import as_stored
from corral.workers.backends.fsdp.loading import load_over_ranks
from corral.workers.backends.fsdp.optimizers import kinds_kept, make_optimizer
from corral.workers.backends.fsdp.tensor_parallel import squared_norm, sum_gradients_of_own_parts
from corral.workers.backends.heads import Head
from corral.workers.backends.host_copies import parameters_that_can_leave
from corral.workers.backends.lora import (
    adapted_layers,
    count_parameters,
    merged_weights,
    sum_of_frozen,
    trained,
)
from corral.workers.backends.mesh_engine import Loss, MeshEngine
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, with_last
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.recompute import recompute_layers
from corral.workers.backends.sharding import layers_of, local, reshard, start_of, sum_gradients, take_over, whole
from corral.workers.backends.train_state import (
    PARAMETER,
    StateShard,
    StoredState,
    TrainStateHeader,
    state_shard,
)
from corral.workers.data.sequence_sample import SequenceSample

# Which models say the same of answers that share their prompt as of answers that each have their own.
#
# model, layout, adapters, products ── why_not_shared ──► None: rows may have prompts once, or the reason why not

_ATTENTION = "full_attention"  # what transformers calls a layer in which a token sees all before it
_KERNEL_TYPES = (torch.bfloat16, torch.float16)  # of Flash Attention on a GPU


def why_not_shared(
    model: Any, lora: LoraConfig | None, *, ranks_of_row: int, device: torch.device, compute_dtype: torch.dtype
) -> str | None:
    """Why rows of this model must have each answer whole; None where they need not.

    Args:
        ranks_of_row: among which the tokens of a row are dealt out.
    """
    config = model.config
    if ranks_of_row > 1:
        return f"c{ranks_of_row} cuts rows by their tokens, and answers must be whole for that"
    if (window := getattr(config, "sliding_window", None)) is not None:
        return f"its layers see {window} tokens back (sliding_window), and not all of a prompt"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - {_ATTENTION}):
        return f"it has layers of the kind {', '.join(others)}"
    if _has_dropout(model, lora):
        return "it has dropout, which draws anew for each answer"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if device.type != "cpu" and (compute_dtype not in _KERNEL_TYPES or head_dim % 8):
        kind = str(compute_dtype).removeprefix("torch.")
        return f"on a GPU products must be bfloat16 and heads a multiple of 8, and these are {kind} and {head_dim}"
    return None


def _has_dropout(model: nn.Module, lora: LoraConfig | None) -> bool:
    of_attention = getattr(model.config, "attention_dropout", 0.0) or 0.0
    of_layers = any(isinstance(module, nn.Dropout) and module.p > 0.0 for module in model.modules())
    return of_layers or of_attention > 0.0 or (lora is not None and lora.dropout > 0.0)


# Whether a model computes the same of sequences in one packed row as of each alone, tried when it is loaded.
#
#     one row of 7 + 12 tokens ── as in training ─────────────────────────────► hidden states ┐ equal but for rounding?
#     each alone ── the model's own attention, whose masks it makes itself ───► hidden states ┘ else the kind is refused
#
# Nothing in a model's code says that it keeps sequences apart: one hands a state on over their borders, another one
# gives attention a mask that a packed row has no place for, and both go on learning from wrong numbers. So it is
# measured.

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


# What a rank of the fsdp backend keeps of a training state: its rows, or its box, of every parameter and moment.
#
# parameters, optimizer.state ──► parts ──► a file of the state          (train_state.py)
# parameters, optimizer.state ◄── filled, after moments were made anew ◄── files of any layout and backend


def make_shard(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    header: TrainStateHeader,
    *,
    rank: int,
    content_of: Callable[[Tensor], Tensor] = local,
) -> StateShard:
    """This rank's parts of every parameter, and of everything that the optimizer, if any, keeps of it.

    Args:
        content_of: gives this rank's part of a tensor, wherever it lies.
    """
    kept = dict(_kept(parameters, optimizer))
    if rank == 0:
        scalars = {name: content_of(tensor) for name, tensor in kept.items() if not tensor.ndim}
        numbers = torch.stack(list(scalars.values())).tolist() if scalars else []  # one wait for the device
        header = replace(
            header,
            sizes={name: list(tensor.shape) for name, tensor in kept.items() if tensor.ndim},
            scalars=dict(zip(scalars, numbers, strict=True)),
        )
    parts = (Part(name, start_of(tensor), content_of(tensor)) for name, tensor in kept.items() if tensor.ndim)
    return state_shard(parts, header, rank=rank)


def read_state(
    stored: StoredState, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> None:
    """Load parameters and optimizer state, in any layout; each rank reads only the part that it holds now.

    Raises:
        ValueError: if the state is of another model or optimizer, or a part of it is missing.
    """
    sizes = {name: parameter.shape for name, parameter in parameters.items()}
    if optimizer is None:
        stored.check(sizes, None)
    else:
        kept = kinds_kept(optimizer)
        stored.check(sizes, lambda name: kept(parameters[name]))
        optimizer.state.clear()
        for name, kinds in stored.header.kinds().items():
            if kinds:
                like = parameters[name].detach()
                numbers = {kind: stored.header.scalars.get(f"{kind}.{name}") for kind in kinds}
                optimizer.state[parameters[name]] = {
                    kind: torch.empty_like(like)  # to be filled
                    if number is None
                    else torch.tensor(number, dtype=torch.float32, device=like.device)
                    for kind, number in numbers.items()
                }
    stored.fill(
        Part(name, start_of(tensor), local(tensor)) for name, tensor in _kept(parameters, optimizer) if tensor.ndim
    )


def _kept(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """By kind and parameter; one parameter after the other."""
    states = {} if optimizer is None else optimizer.state
    for name, parameter in parameters.items():
        yield f"{PARAMETER}.{name}", parameter
        for kind, value in states.get(parameter, {}).items():
            yield f"{kind}.{name}", value


class FSDPEngine(MeshEngine):
    """A `MeshEngine` over a transformers model with one of the `HEADS`.

    Master weights and optimizer state are float32; `compute_dtype` is the type of the matrix products and of the
    weights that `save_weights` writes. Adapters (`lora.py`), where there are any, are all that is trained and resumed
    from, and what is exported is what the model and they amount to. For the rest see `MeshEngine`.
    """

    def _load(self) -> Any:
        context, lora, compute_dtype = self.context, self.lora, self.compute_dtype
        self._model: nn.Module = load_over_ranks(
            self.directory,
            self._head,
            context,
            lora,
            seed=self.seed,
            compute_dtype=compute_dtype,
            is_held_low=self.is_held_low,
        )
        self._unshared_because = why_not_shared(
            self._model, lora, ranks_of_row=context.mesh.dims.cp, device=context.device, compute_dtype=compute_dtype
        )
        recompute_layers(layers_of(self._model), self.recompute)
        self.num_parameters, self.num_trained = count_parameters(self._model)
        if lora is not None:
            own_sum = sum_of_frozen(self._model, counts_copies=context.coords.tp_rank == 0)
            self._note_adapters(lora, adapted_layers(self._model), own_sum=own_sum)
        if self.optimizer is not None:
            self._optimizer = make_optimizer(self._model, self.optimizer, compute_dtype=compute_dtype)
        refuse_unless_packed_alike(
            self._model, self._head, self._own_scores, context=context, compute_dtype=compute_dtype
        )
        return self._model.config

    @property
    def model(self) -> nn.Module:
        """The module itself, for evaluation by generation; cut over the ranks where there are several.

        Whatever reads weights comes by here, and finds them on the device.
        """
        self.onload()
        return self._model

    # --- computing --------------------------------------------------------------------------------------------------

    def _forward(self, micro_batches: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        self._model.eval()
        for micro_batch in micro_batches:
            yield micro_batch, self._scores(micro_batch)
        reshard(self._model)  # no backward pass will

    def _backward(self, micro_batches: Iterator[MicroBatch], loss: Loss) -> None:
        torch.manual_seed(self._seed_of_step())
        self._model.train()
        for micro_batch, is_last in with_last(micro_batches):
            sum_gradients(self._model, is_last or self.gradient_sums == "each_micro_batch")
            torch.autograd.backward(loss(self._scores(micro_batch), micro_batch))

    def _scores(self, micro_batch: MicroBatch) -> Tensor:
        """The head's columns of a whole micro-batch, on every rank that has a part of it."""
        context = self.context
        if context.cp_group is None:
            return self._own_scores(micro_batch)
        part = cut_row(micro_batch, rank=context.coords.cp_rank, num_ranks=context.mesh.dims.cp)
        return part.join(self._own_scores(part.micro_batch), self._head.layout, context.cp_group)

    def _own_scores(self, micro_batch: MicroBatch) -> Tensor:
        with torch.autocast(
            self.context.device.type,
            dtype=self.compute_dtype,
            enabled=self.compute_dtype != torch.float32,
            cache_enabled=False,  # it would hold what `cast_per_use` lets go
        ):
            return self._head.columns(self.model, micro_batch)

    def _squared_norm(self) -> Tensor:
        parameters = self._trained()
        if self.context.tp_group is not None:
            sum_gradients_of_own_parts(parameters.items(), self.context.tp_group)
        return squared_norm(parameters.values(), tensor_ranks=self.context.mesh.dims.tp, device=self.context.device)

    # --- saving -----------------------------------------------------------------------------------------------------

    def _stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        # Rounded before they are gathered, which is half as much to send and to hold.
        return as_stored(self.model, self._whole_weights(self.compute_dtype), dtype=self.compute_dtype)

    def _whole_trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, whole(parameter)) for name, parameter in self._trained().items())

    def _state_shard(self, header: train_state.TrainStateHeader) -> train_state.StateShard:
        content_of = local if self._hosted is None else self._hosted.content_of
        return make_shard(self._trained(), self._optimizer, header, rank=self.context.mesh_rank, content_of=content_of)

    def _read_shard(self, stored: train_state.StoredState) -> None:
        read_state(stored, self._trained(), self._optimizer)

    # --- weights ----------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `MeshEngine.export_weights`."""
        return self._whole_weights(torch.float32)

    def _whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        reshard(self.model)
        yield from merged_weights(self._model, dtype=dtype)

    def import_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """See `MeshEngine.import_weights`."""
        self._require_trained_weights()
        assert eta == 1.0 or not self.is_held_low, "an average of weights moves by less than a low type can tell"
        take_over(self._parameters(), weights, eta=eta)

    def _own_tensors(self) -> list[Tensor]:
        reshard(self._model)
        return parameters_that_can_leave(self._model)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """This rank's rows of every parameter, by name; a tied one is there once."""
        reshard(self.model)
        return dict(self.model.named_parameters())

    def _trained(self) -> dict[str, nn.Parameter]:
        """Those that a step changes: all of them, or adapters and a score layer."""
        return trained(self._parameters())
