"""The last layer of a language model, which answers a question in place of giving logits.

    Question ──ask──► forward pass of the model ── hidden [1, T, H] ──► ChunkedHead ──► columns [1, T, c]

It takes the place of a model's last layer, with the same parameters under the same names, so that FSDP2 gathers them as
any others and a weight that is also the embedding's stays one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from corral.workers.backends.base import TokenScores
from corral.workers.backends.low_precision import CastingLinear, products_type
from corral.workers.backends.sharding import local_with_gradient

# What transformers' models call what they do to logits after their last layer.
_TREATMENTS: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


# Hidden states ──► log-probabilities of the tokens that came next, without logits of more than one chunk of tokens.
#
#     hidden [T, H] ── chunk [n, H] ──► logits [n, V] ──► four sums of each token's softmax ──► TokenScores [T]
#                                         │ let go                                (over ranks: VocabularyShard)
#     gradient of logprobs [T] ──► logits [n, V] anew ──► one_hot - softmax ──► gradients of hidden and weight
#
# Each token may be asked for a few others beside the one that came next: that is a sum more for each of them. Without a
# gradient the likeliest ones can be asked for: those of a teacher, whose distribution is learned from.
#
# A row of logits is as long as the vocabulary: 32k tokens of 152k logits are 20 GB, and a plain softmax holds several
# such tensors at its worst moment. Here nothing of that size exists, forward or backward; the price is one product
# more.
#
# A vocabulary may be cut over ranks: what each knows of the softmax from its own tokens is put together.
#
#     rank 0: logits of tokens 0 .. V/t - 1    ──► four sums ─┐
#     rank 1: logits of tokens V/t .. 2V/t - 1 ──► four sums ─┴─ all-reduce max, all-reduce sum ──► sums over all
#
# The logits themselves never travel: four numbers of each token do, in two collectives of a micro-batch. Every rank of
# the group gives the same hidden states and labels, and gets the same scores, and a part of the hidden states'
# gradient.


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The rows of a head on this rank, and the ranks that have the other rows.

    The gradient of the hidden states is left to each rank in the part of its own rows: callers add the parts up.
    """

    group: dist.ProcessGroup | None = None
    """The ranks that have the other rows; None where this one has them all."""
    first: int = 0
    """The token of this rank's first row. Rows that only fill a vocabulary up must be left out of every rank's."""

    def combine(self, sums: Tensor) -> Tensor:
        """`_softmax_sums` [3 + m, T] over the rows of all ranks, from those over this rank's; a collective."""
        if self.group is None:
            return sums
        own_largest, exponentials, weighted, *of_labels = sums
        largest = own_largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        below = own_largest - largest
        factor = below.exp()
        packed = torch.stack([factor * exponentials, factor * (weighted + below * exponentials), *of_labels])
        dist.all_reduce(packed, group=self.group)
        return torch.stack([largest, *packed])

    def join(self, columns: Tensor) -> Tensor:
        """[T, c] of each rank, the same c, side by side: [T, ranks * c]; a collective of the group."""
        if self.group is None:
            return columns
        parts = [torch.empty_like(columns) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, columns.contiguous(), group=self.group)
        return torch.cat(parts, 1)


WHOLE_VOCABULARY = VocabularyShard()


# Of one chunk's logits, of which two copies exist at the worst moment: little beside a model with a large vocabulary.
# At one of 152k a chunk has 441 rows, for which a product is bound by arithmetic and not by reading the weight.
_CHUNK_BYTES: Final = 2**28


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    asked: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
    shard: VocabularyShard = WHOLE_VOCABULARY,
    chunk_tokens: int | None = None,
) -> TokenScores:
    """Log-probability of each label and of what is asked for besides, and the entropy of the distribution of both.

    The logits are hidden weight^T + bias, divided by the temperature, of which a chunk of tokens exists at a time.

    Args:
        hidden: [T, H] in any float type; row t predicts `labels[t]`.
        weight: [V, H] in any float type: the rows of the vocabulary that this rank has.
        labels: [T] int64: tokens of the whole vocabulary.
        asked: [T, k] int64: further ones.
        bias: [V].
        temperature: logits are divided by it, as the sampler did, by one or by one for each token, [T] float32; 0
            (greedy) is read as 1.
        dtype: type that the operands of products are rounded to; results are float32 whatever it is.
        shard: this rank's rows of a vocabulary that is cut over ranks; a collective of its group.
        chunk_tokens: rows of logits that exist at once; None takes as many as a bounded number of bytes holds.
    """
    labels = labels[:, None] if asked is None else torch.cat([labels[:, None], asked], 1)
    chunk_tokens = chunk_tokens or _tokens_of_chunk(weight)
    apply: Any = _ChunkedScores.apply
    logprobs, entropy = apply(hidden, weight, bias, labels, _scale(temperature), dtype, shard, chunk_tokens)
    return TokenScores(logprobs[:, 0], entropy, None if asked is None else logprobs[:, 1:])


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
    shard: VocabularyShard = WHOLE_VOCABULARY,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids [T, k] int64, log-probabilities [T, k] float32) of the likeliest tokens, the first one first.

    Args:
        k: at most the whole vocabulary. For the rest see `score_tokens`.
    """
    own, scale = min(k, weight.shape[0]), _scale(temperature)
    sums = hidden.new_empty((3, hidden.shape[0]), dtype=torch.float32)
    ids = hidden.new_zeros((hidden.shape[0], k), dtype=torch.int64)
    values = torch.full_like(ids, -torch.inf, dtype=torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        rows = _operand(weight, dtype)
        for chunk in _chunks(hidden.shape[0], chunk_tokens or _tokens_of_chunk(weight)):
            logits = _logits(_operand(hidden[chunk], dtype), rows, bias, _of(chunk, scale))
            values[chunk, :own], ids[chunk, :own] = logits.topk(own)
            sums[:, chunk] = _softmax_sums(logits, ids.new_empty((len(logits), 0)))
    largest, total, _ = shard.combine(sums)
    values, places = shard.join(values).topk(k)
    return shard.join(ids + shard.first).gather(1, places), (values - largest[:, None]) - total.log()[:, None]


def _scale(temperature: float | Tensor) -> float | Tensor:
    """What logits are multiplied by: [T, 1] where each token has its own."""
    if isinstance(temperature, Tensor):
        return torch.where(temperature > 0.0, 1.0 / temperature, 1.0)[:, None]
    return 1.0 / temperature if temperature > 0.0 else 1.0


def _of(chunk: slice, scale: float | Tensor) -> float | Tensor:
    return scale[chunk] if isinstance(scale, Tensor) else scale


def _tokens_of_chunk(weight: Tensor) -> int:
    return max(1, _CHUNK_BYTES // (4 * weight.shape[0]))


class _ChunkedScores(torch.autograd.Function):
    """log_softmax(scale * logits)[labels]; by logits: scale * the sum over labels of (one_hot(label) - softmax)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float | Tensor,
        dtype: torch.dtype,
        shard: VocabularyShard,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        labels = labels - shard.first
        sums = hidden.new_empty((3 + labels.shape[1], hidden.shape[0]), dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            rows = _operand(weight, dtype)
            for chunk in _chunks(hidden.shape[0], chunk_tokens):
                logits = _logits(_operand(hidden[chunk], dtype), rows, bias, _of(chunk, scale))
                sums[:, chunk] = _softmax_sums(logits, labels[chunk])
        largest, total, weighted, *of_labels = shard.combine(sums)
        log_total = total.log()
        entropy = log_total - weighted / total  # in nats
        ctx.save_for_backward(hidden, weight, bias, labels, largest + log_total)
        ctx.mark_non_differentiable(entropy)
        ctx.scale, ctx.dtype, ctx.shard, ctx.chunk_tokens = scale, dtype, shard, chunk_tokens
        return torch.stack([(of_label - largest) - log_total for of_label in of_labels], 1), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_normalizer = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        slopes = gradients[0] * ctx.scale
        of_hidden = torch.empty_like(hidden, dtype=torch.float32) if needs_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            rows = _operand(weight, ctx.dtype)
            for chunk in _chunks(hidden.shape[0], ctx.chunk_tokens):
                inputs = _operand(hidden[chunk], ctx.dtype)
                logits = _logits(inputs, rows, bias, _of(chunk, ctx.scale))
                of_logits = _logits_gradient(logits, labels[chunk], log_normalizer[chunk], slopes[chunk])
                if of_bias is not None:
                    of_bias += of_logits.sum(0)
                of_products = _operand(of_logits, ctx.dtype)
                if of_hidden is not None:
                    of_hidden[chunk] = _product(of_products, rows)
                if of_weight is not None:
                    _add_product(of_weight, of_products.T, inputs)
        if of_hidden is not None:
            of_hidden = of_hidden.to(hidden.dtype)
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        return of_hidden, of_weight, None if of_bias is None else of_bias.to(bias.dtype), *[None] * 5


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens))


def _logits(inputs: Tensor, rows: Tensor, bias: Tensor | None, scale: float | Tensor) -> Tensor:
    """[n, H], [V, H] -> [n, V] float32."""
    logits = _product(inputs, rows.T)
    if bias is not None:
        logits += bias
    return logits.mul_(scale) if isinstance(scale, Tensor) or scale != 1.0 else logits


def _softmax_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """What is known of each row's softmax from some of its columns: [3 + m, n] float32.

    The largest logit z among them; the sum of exp(z - largest); the sum of (z - largest) exp(z - largest); and the
    logit of each label, 0 where the label is not among them.

    Args:
        logits: [n, V], which are used up.
        labels: [n, m].
    """
    is_own, columns = _own_columns(labels, logits.shape[1])
    of_labels = logits.gather(1, columns) * is_own
    largest = logits.amax(1)
    exponentials = logits.sub_(largest[:, None]).exp()
    total = exponentials.sum(1)
    return torch.stack([largest, total, logits.mul_(exponentials).sum(1), *of_labels.T])


def _logits_gradient(logits: Tensor, labels: Tensor, log_normalizer: Tensor, slopes: Tensor) -> Tensor:
    """[n, V]: the sum over m labels of slope * (one_hot(label) - softmax(logits)), in the memory of the logits."""
    gradient = logits.sub_(log_normalizer[:, None]).exp_().mul_(-slopes.sum(1, keepdim=True))
    is_own, columns = _own_columns(labels, logits.shape[1])
    return gradient.scatter_add_(1, columns, slopes * is_own)


def _own_columns(labels: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """[n, m] whether each label is one of the columns, and its column, 0 where it is not."""
    is_own = (labels >= 0) & (labels < num_columns)
    return is_own, torch.where(is_own, labels, 0)


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor rounded as products take it; widened again where the device knows no product of low types in float32."""
    rounded = tensor.to(dtype)
    return rounded if rounded.device.type == "cuda" else rounded.float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32, added up and given, whatever the operands are."""
    return left @ right if left.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a row's tokens, and the columns of its answer."""

    labels: Tensor
    """[T] int64: the tokens that came next."""
    asked: Tensor | None = None
    """[T, k] int64: others, whose log-probabilities are wanted besides."""
    top_k: int = 0
    """Above 0 the likeliest tokens are wanted, in place of anything else."""
    temperature: float | Tensor = 1.0
    """That logits are divided by: of all, or [T] float32."""

    @property
    def num_columns(self) -> int:
        """Of the answer: log-probability, entropy, those asked for; or ids, and log-probabilities, of the likeliest."""
        return 2 * self.top_k or 2 + (0 if self.asked is None else self.asked.shape[1])

    def answer(self, hidden: Tensor, weight: Tensor, **how: Any) -> Tensor:
        """[T, columns] float32; float32 has every id below 2^24.

        Args:
            how: the rest of what `score_tokens` takes.
        """
        if self.top_k:
            ids, logprobs = likeliest_tokens(hidden, weight, self.top_k, temperature=self.temperature, **how)
            return torch.cat([ids.float(), logprobs], 1)
        scores = score_tokens(hidden, weight, self.labels, asked=self.asked, temperature=self.temperature, **how)
        columns = torch.stack([scores.logprobs, scores.entropy], 1)
        return columns if scores.asked is None else torch.cat([columns, scores.asked], 1)


class ChunkedHead(CastingLinear):
    """The last layer of a language model: answers to a question while it is asked, and logits otherwise."""

    shard: VocabularyShard = WHOLE_VOCABULARY
    _question: Question | None = None
    """Of the forward pass that is under way."""
    _answer: Tensor | None = None
    """[1, T, columns] float32."""

    def ask(self, question: Question, forward: Callable[[], Tensor]) -> Tensor:
        """[T, columns]: what a forward pass of the model says, in the place of [1, T, V] logits.

        Raises:
            ValueError: if the model did something to what its last layer gave: scores are no logits.
        """
        self._question = question
        try:
            output = forward()
            if output is not self._answer:
                raise ValueError(
                    "the model changes the logits that its last layer gives, by a scale, a cap or a type of its own, "
                    "and the log-probabilities are made in that layer; train a model that leaves its logits as they are"
                )
            return output[0]
        finally:
            self._question = self._answer = None  # the graph of an answer must not live on in a module

    def forward(self, input: Tensor) -> Tensor:
        """[1, T, H] -> [1, T, columns] while it is asked, else [..., H] -> [..., V]."""
        if self._question is None:
            return super().forward(input)
        columns = self._question.answer(
            input[0],
            local_with_gradient(self.weight),
            bias=None if self.bias is None else local_with_gradient(self.bias),
            dtype=products_type(self.weight),
            shard=self.shard,
        )
        self._answer = columns[None]
        return self._answer


def install_chunked_head(model: Any) -> None:
    """Let a language model's last layer be a `ChunkedHead`; the parameters stay what and where they are.

    Raises:
        ValueError: if the last layer is no linear layer, or its logits are not those that the model gives.
    """
    treated = [name for name in _TREATMENTS if getattr(model.config, name, None) not in (None, 1.0)]
    if treated:
        raise ValueError(
            f"a {type(model).__name__} with {treated[0]} = {getattr(model.config, treated[0])} changes its logits "
            "after its last layer, in which the log-probabilities are made; train a model that leaves them as they are"
        )
    layer = model.get_output_embeddings()
    if type(layer) not in (nn.Linear, CastingLinear):
        raise ValueError(
            f"the last layer of a {type(model).__name__} is {type(layer).__name__}, and log-probabilities are made in "
            "a plain linear layer; train a model that ends in one"
        )
    layer.__class__ = ChunkedHead
