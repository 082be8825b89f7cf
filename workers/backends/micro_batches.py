"""Sample -> micro-batches: answers packed into token budgets, each a set of flat tensors on the training device.

    answers of all samples ── pack_first_fit_decreasing ──► bins ──► MicroBatch | MicroBatch | ... | (padding)
    results of the micro-batches, in any layout ── scatter_to_answers ──► one array in the sample's order

A row is its answers laid end to end, or has what the answers of a prompt begin with once (workers/shared_prompts);
what an answer is asked and what losses read is the same for both.

Collectives inside a forward pass must be met by every rank, so all ranks run the same number of micro-batches; a rank
with fewer runs padding: a short answer whose loss mask is False throughout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.scheduling.keys import FOR_PEOPLE, ROUTED_EXPERTS, TEACHER_TOPK_IDS, TEMPERATURES, KeyLayout, find_declared
from corral.scheduling.packing import MicroBatchSpec, pack_first_fit_decreasing
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from corral.workers.shared_prompts import (
    Beginnings,
    PromptGroup,
    SharedRow,
    groups_of_row,
    pack_groups,
    shared_row,
)

_PADDING_TOKENS = 2  # the shortest answer that still predicts a token


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """n answers of T tokens, of which T - n have a next token to predict, packed into one row of R tokens.

    R is T, and the row is the answers laid end to end, unless `shared` says otherwise.
    """

    answers: tuple[int, ...]
    """Number of each answer within the sample, counted over all groups; empty for padding."""
    segment_lengths: tuple[int, ...]
    """[n] tokens of each answer."""
    cu_seqlens: Tensor
    """[n + 1] int32: where segments begin and end in the row, from 0; all layers read it, on the device."""
    input_ids: Tensor
    """[R] int64: the row."""
    position_ids: Tensor
    """[R] int64, from 0 in each answer."""
    predicting: Tensor
    """[T - n] int64: which tokens of the answers, laid end to end, predict `labels`: all but the last of each."""
    labels: Tensor
    """[T - n] int64: the next tokens."""
    last_tokens: Tensor
    """[n] int64: which token of the answers, laid end to end, is the last of each."""
    tensors: dict[str, Tensor]
    """Every key of the sample but input_ids, the experts, the temperatures and what is asked, cut to these answers.
    Keys per shifted token align with `labels`."""
    routed_experts: Tensor | None = None
    """[R, layers with experts, top_k] int16: experts of each token, -1 where the model chooses; None: it chooses
    all."""
    asked: Tensor | None = None
    """[T - n, k] int64: tokens whose log-probabilities are wanted besides those of `labels`."""
    top_k: int = 0
    """Above 0 it is asked for so many likeliest tokens in the place of each label, and nothing else."""
    temperature: float | Tensor = 1.0
    """That logits are divided by: of all, or float32 of each label, where prompts are shared of each of `shared`."""
    shared: SharedRow | None = None
    """Where the tokens of the answers are, in a row that has prompts once."""

    @property
    def is_padding(self) -> bool:
        """Whether this only keeps the rank in step with the others."""
        return not self.answers


def plan_micro_batches(
    sample: SequenceSample, spec: MicroBatchSpec, *, keeps_groups: bool = False, shares_prompts: bool = False
) -> list[list[int]]:
    """Answers of each micro-batch, shorter ones first: attention takes neighbours of equal length together.

    Args:
        keeps_groups: whether all answers of a prompt go into one micro-batch, in their own order.
        shares_prompts: whether rows will have once what the answers of a prompt begin with: then those are neighbours,
            and it counts once in the budget of tokens.
    """
    lengths = sample.answer_lengths() if "input_ids" in sample.seqlens else []
    if not lengths:
        return []
    max_tokens = max(1, sum(lengths) if (budget := spec.max_tokens_per_micro_batch) is None else budget)
    units = _groups(sample) if keeps_groups else [[answer] for answer in range(len(lengths))]
    sizes = [sum(lengths[answer] for answer in unit) for unit in units]
    if shares_prompts and max(lengths) <= max_tokens:
        packed, packed_sizes = pack_groups(
            _groups(sample), lengths, Beginnings(sample), max_tokens=max_tokens, is_cut=not keeps_groups
        )
        if len(packed) >= min(spec.n_min, len(units)):  # else there would be too few micro-batches
            units, sizes = packed, packed_sizes
    bins = pack_first_fit_decreasing(sizes, max_tokens=max_tokens, min_bins=spec.n_min)
    ordered = [sorted(bin_, key=lambda unit: (sizes[unit], unit)) for bin_ in bins]
    return [[answer for unit in bin_ for answer in units[unit]] for bin_ in ordered]


def _groups(sample: SequenceSample) -> list[list[int]]:
    """Numbers of the answers of each prompt."""
    ends = list(accumulate(sample.num_answers_per_sample()))
    return [list(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]


def make_micro_batches(
    sample: SequenceSample,
    plan: Sequence[Sequence[int]],
    *,
    count: int,
    device: torch.device,
    shares_prompts: bool = False,
    top_k: int = 0,
    temperature: float = 1.0,
) -> Iterator[MicroBatch]:
    """The planned micro-batches, then padding until there are `count`.

    Args:
        shares_prompts: whether rows have once what neighbours of one prompt begin with.
        top_k: see `MicroBatch`.
        temperature: of answers whose sample does not say it.
    """
    slices = {key: answer_slices(sample.answer_lengths(key)) for key in sample.data}
    lengths = sample.answer_lengths() if plan else []
    prompts = [number for number, group in enumerate(_groups(sample)) for _ in group] if plan else []
    beginnings = Beginnings(sample) if shares_prompts and plan else None
    for answers in plan:
        tensors = {
            key: torch.cat([torch.as_tensor(array[slices[key][answer]]) for answer in answers])
            for key, array in sample.data.items()
            if key not in FOR_PEOPLE
        }
        if ROUTED_EXPERTS in tensors:
            tensors[ROUTED_EXPERTS] = tensors[ROUTED_EXPERTS].view(
                -1, *find_declared(ROUTED_EXPERTS, sample.specs).shape
            )
        groups = None if beginnings is None else groups_of_row(answers, lengths, prompts, beginnings)
        row = [lengths[answer] for answer in answers]
        yield pack_row(answers, row, tensors, device, groups=groups, top_k=top_k, temperature=temperature)
    for _ in range(count - len(plan)):
        tensors = _padding_tensors(sample)
        yield pack_row((), (_PADDING_TOKENS,), tensors, device, top_k=top_k, temperature=temperature)


def _padding_tensors(sample: SequenceSample) -> dict[str, Tensor]:
    """One answer of zeros in every key of the sample, so that losses see the same keys in padding as elsewhere."""
    tensors = {"input_ids": torch.zeros(_PADDING_TOKENS, dtype=torch.int64)}
    for key in sample.data.keys() - {"input_ids", ROUTED_EXPERTS, *FOR_PEOPLE}:
        spec = find_declared(key, sample.specs)
        tensors[key] = torch.as_tensor(np.zeros(spec.length(_PADDING_TOKENS), spec.dtype))
    return tensors


def pack_row(
    answers: Sequence[int],
    segment_lengths: Sequence[int],
    tensors: dict[str, Tensor],
    device: torch.device,
    *,
    groups: tuple[PromptGroup, ...] | None = None,
    top_k: int = 0,
    temperature: float | Tensor = 1.0,
) -> MicroBatch:
    """A micro-batch of answers in this order.

    Args:
        segment_lengths: tokens of each.
        tensors: every key of these answers, `input_ids` among them, which is used up.
        groups: how the answers share prompts; None where each has its own.
    """
    input_ids = tensors.pop("input_ids").to(torch.int64)
    position_ids = torch.cat([torch.arange(length) for length in segment_lengths])
    has_next = torch.ones(input_ids.shape[0], dtype=torch.bool)
    routed_experts, asked = tensors.pop(ROUTED_EXPERTS, None), tensors.pop(TEACHER_TOPK_IDS, None)
    last_tokens = torch.tensor(segment_lengths).cumsum(0) - 1
    has_next[last_tokens] = False
    predicting = has_next.nonzero().squeeze(1)
    labels = input_ids[predicting + 1]
    if TEMPERATURES in tensors:
        temperature = tensors.pop(TEMPERATURES).repeat_interleave(torch.tensor(segment_lengths) - 1)
    shared = None
    if groups is not None:
        sources, row = shared_row(groups, input_ids)
        shared = SharedRow(groups, *(_sent(tensor, device) for tensor in row[1:]))
        if isinstance(temperature, Tensor):  # which answers of one prompt have in common
            of_answers, temperature = temperature, temperature.new_ones(len(row.labels))
            temperature[row.questions] = of_answers
        input_ids, position_ids = input_ids[sources], position_ids[sources]
        routed_experts = None if routed_experts is None else routed_experts[sources]
    return MicroBatch(
        answers=tuple(answers),
        segment_lengths=tuple(segment_lengths),
        cu_seqlens=_sent(torch.tensor([0, *accumulate(segment_lengths)], dtype=torch.int32), device),
        input_ids=_sent(input_ids, device),
        position_ids=_sent(position_ids, device),
        predicting=_sent(predicting, device),
        labels=_sent(labels, device),
        last_tokens=_sent(last_tokens, device),
        tensors={key: _sent(tensor, device) for key, tensor in tensors.items()},
        routed_experts=None if routed_experts is None else _sent(routed_experts, device),
        asked=None if asked is None else _sent(asked.to(torch.int64).view(len(labels), -1), device),
        top_k=top_k,
        temperature=_sent(temperature, device) if isinstance(temperature, Tensor) else temperature,
        shared=shared,
    )


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device; to a GPU from pinned memory, or the host would wait for what was enqueued before."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def with_last(micro_batches: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    """Each micro-batch, and whether it is the last; one more than that is made ahead."""
    present = next(micro_batches, None)
    while present is not None:
        following = next(micro_batches, None)
        yield present, following is None
        present = following


def scatter_to_answers(
    sample: SequenceSample, outputs: Sequence[tuple[MicroBatch, Tensor]], layout: KeyLayout
) -> npt.NDArray[np.float32]:
    """Results of each micro-batch in one layout, [entries, ...] each, put back into the sample's order."""
    lengths = [layout.length(n) for n in sample.answer_lengths()] if "input_ids" in sample.seqlens else []
    slices = answer_slices(lengths)
    result = np.zeros((sum(lengths), *(outputs[0][1].shape[1:] if outputs else ())), dtype=np.float32)
    for micro_batch, values in outputs:
        pieces = torch.split(values, [layout.length(n) for n in micro_batch.segment_lengths])
        for answer, piece in zip(micro_batch.answers, pieces, strict=True):
            result[slices[answer]] = piece.numpy()
    return result
