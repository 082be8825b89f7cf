"""A softmax over a vocabulary that is cut over ranks: what each rank knows of its own tokens, put together.

    rank 0: logits of tokens 0 .. V/t - 1    ──► SoftmaxSums ─┐
    rank 1: logits of tokens V/t .. 2V/t - 1 ──► SoftmaxSums ─┴─ all-reduce max, all-reduce sum ──► SoftmaxSums of all

The logits themselves never travel: four numbers of each token do, in two collectives of a micro-batch. The whole head,
forward and backward, is `chunked_head.score_tokens(hidden, own rows, labels, share=VocabularyShare(group, first))`:
every rank of the group gives the same hidden states and labels, and gets the same scores.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SoftmaxSums:
    """What is known of each row's softmax from some of its columns: all [T] float32."""

    largest: Tensor
    """The largest logit z among them."""
    exponentials: Tensor
    """Sum of exp(z - largest)."""
    weighted: Tensor
    """Sum of (z - largest) exp(z - largest)."""
    of_label: Tensor
    """The label's logit; 0 where the label is not among them."""

    def log_normalizer(self) -> Tensor:
        """[T]: log of the sum of exp(z)."""
        return self.largest + self.exponentials.log()

    def logprobs(self) -> Tensor:
        """[T]: of the labels; where these are the sums over all columns."""
        return (self.of_label - self.largest) - self.exponentials.log()

    def entropy(self) -> Tensor:
        """[T]: in nats; where these are the sums over all columns."""
        return self.exponentials.log() - self.weighted / self.exponentials


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """Which rows of a head this rank has, and with whom it has all of them."""

    group: dist.ProcessGroup | None = None
    """The ranks that have the other rows; None where this one has them all."""
    first: int = 0
    """The token of this rank's first row. Rows that only fill a vocabulary up must be left out of every rank's."""
    sums_hidden_gradient: bool = True
    """Whether the gradient of the hidden states is summed over the group, so that every rank has it whole. False leaves
    each rank the part of its own rows, for a caller whose own backward pass adds them up, such as the reduce-scatter
    behind a gather of sequence shards."""

    def combine(self, sums: SoftmaxSums) -> SoftmaxSums:
        """The sums over the rows of all ranks, from those over this rank's; a collective of the group."""
        if self.group is None:
            return sums
        largest = sums.largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        below = sums.largest - largest
        factor = below.exp()
        weighted = factor * (sums.weighted + below * sums.exponentials)
        packed = torch.stack([factor * sums.exponentials, weighted, sums.of_label])
        dist.all_reduce(packed, group=self.group)
        return SoftmaxSums(largest, *packed.unbind())

    def combine_hidden_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of the hidden states as `sums_hidden_gradient` says; it is written to."""
        if self.group is not None and self.sums_hidden_gradient:
            dist.all_reduce(gradient, group=self.group)
        return gradient


WHOLE_VOCABULARY = VocabularyShare()
