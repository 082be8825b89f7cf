"""Sizes of a decoder, its layout, tokens of a micro-batch -> bytes that autograd keeps for the backward pass.

Tensors of one layer, for each token: H hidden, I intermediate, Q all heads of queries, K those of keys, D one head, E
experts of which k are taken, X the inner size of one, S that of a shared one. float32 is 4 bytes, a product's type c.

                     fsdp (FSDP2, c > 1 under autocast)               megatron (its own layer; t: sequence parallel)
 2 norms             2 x (input H, normalized H, scale): 4, as the   2 x (input H: c, scale: 4) / t, as a GPU's
                     residual stream is float32; the normalized      kernel keeps them
                     only for a weight that is trained
 inputs of products  q, k, v | gate, up: H each: c; under autocast    q, k, v in one; gate and up: H each: c, / t; with
                     each has its rounded copy, else two              adapters all of the tokens, not a part
 attention           queries Q, keys K, values K, result Q: c;     projected Q + 2 K, rotated Q + K, result Q twice: c;
                     logsumexp: 4 a head                              cosine, sine 4 D: c; logsumexp: 4 a head
 norms of heads      input and normalized 2 (Q + K): 4; under         scales: 4 a head; queries Q: c, where they do not
                     autocast one is rounded to c                    follow each other in what was projected
 MLP                 gate, activated gate, up, product 4 I c / t gate and up 2 I, up, activated gate, product 5 I c / t
 router              E: 4                                             chosen, weighed and sent: E (5 + c) / t
 experts, each of k  4 X + 2 H: c, weight c, four indices            H + 5 X / t + weight: c; where it came from: 16 / t
 shared expert       as an MLP; result H, how much of it 1: c;        as an MLP; result H, how much of it 1: c / t
                     rounded: 3 more copies of the input
 adapters            r between A and B: c; a rounded copy of its      r: c
                     own of the input where that is float32: c

All of that is what a layer keeps; where it is computed again in the backward pass, it keeps less until then, and the
layer whose turn it is has all of it again, and gradients (`gradients_in`). Without gradients it keeps nothing, and has
what it computes with at a time (`passes_through`):

 recompute: selective  its input H, and what products gave: Q + 2 K, Q, H | 2 I, H, or the router's; of adapters r and
                       what B gave; with shared prompts once more Q, and a head's logsumexp
 recompute: full       its input H

Found with torch.autograd.graph.saved_tensors_hooks on tiny models, and counted again so by the tests. Tokens are taken
to be spread evenly over experts: a rank whose experts are chosen more often keeps more.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from corral.scheduling.memory.decoder_sizes import DecoderSizes, Output
from corral.scheduling.parallel import ParallelDims

Backend = Literal["fsdp", "megatron"]
Recompute = Literal["none", "selective", "full"]
"""What layers compute again in the backward pass (workers/backends/recompute.py)."""

FLOAT32_BYTES = 4
_INDEX_BYTES = 8  # of int64
_INDICES_PER_EXPERT = 4  # which expert, and the order in which tokens are sorted by it and back
_INPUT_BYTES = 16 * _INDEX_BYTES  # ids, positions, labels and indices of a row and the next, scores, keys of a loss
_SUMS_BYTES = 4 * FLOAT32_BYTES + 2 * _INDEX_BYTES  # of the softmax, and the token's place and label
_READ_FLOAT32 = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # the others read what a product gave
HEAD_CHUNK_BYTES = 2**28
"""Logits that the last layer makes at a time (workers/backends/chunked_head.py)."""


def shard_size(number: int, tensor_parallel: int) -> int:
    """Rows or columns of each tensor-parallel rank: an equal part, or all of them if they cannot be divided equally."""
    return number if number % tensor_parallel else number // tensor_parallel


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a model in one layout: bytes of one token on the rank that has it."""

    sizes: DecoderSizes
    backend: Backend = "fsdp"
    dims: ParallelDims = ParallelDims()
    compute_bytes: int = FLOAT32_BYTES
    """Of a number in matrix products: 4 or 2."""
    trains_weights: bool = True
    """Not where adapters are trained in place of them."""
    shares_prompts: bool = False
    """Whether attention has two results, of an answer and of its prompt, before they are one."""

    @cached_property
    def _heads(self) -> tuple[int, int]:
        return self.sizes.num_heads // self.dims.tp, self.sizes.num_key_value_heads // self.dims.tp

    @cached_property
    def _widths(self) -> tuple[int, int]:
        """Numbers of a token's queries, and of its keys."""
        heads, key_heads = self._heads
        return heads * self.sizes.head_dim, key_heads * self.sizes.head_dim

    @property
    def _stream(self) -> int:
        """What goes from layer to layer."""
        if self.backend == "megatron":
            return self.compute_bytes * -(-self.sizes.hidden_size // self.dims.tp)
        return FLOAT32_BYTES * self.sizes.hidden_size

    def _inner(self, layer: int) -> int:
        """Numbers between the products of the MLP, or of the shared expert."""
        sizes = self.sizes
        is_sparse = layer in sizes.sparse_layers
        return shard_size(sizes.shared_expert_size if is_sparse else sizes.intermediate_size, self.dims.tp)

    @property
    def _is_rounded(self) -> bool:
        return self.compute_bytes < FLOAT32_BYTES

    def works_in(self, layer: int) -> int:
        """All that one layer keeps for its own backward pass, without adapters."""
        return self._fsdp(layer) if self.backend == "fsdp" else self._megatron(layer)

    def kept(self, layer: int, recompute: Recompute) -> int:
        """What one layer keeps until its backward pass, without adapters: all, or less where it is computed again."""
        if recompute == "none":
            return self.works_in(layer)
        if recompute == "full":
            return self._stream
        sizes, (queries, keys), inner = self.sizes, self._widths, self._inner(layer)
        products = 2 * (queries + keys) + sizes.hidden_size + (2 * inner + sizes.hidden_size if inner else 0)
        if layer in sizes.sparse_layers:
            # Products of experts are one operation for all, which is not kept (workers/backends/recompute.py).
            products += -(-sizes.num_experts // self.dims.tp) + (1 if inner else 0)
        results = 2 if self.shares_prompts else 1
        products += (results - 1) * queries
        return self._stream + self.compute_bytes * products + results * FLOAT32_BYTES * self._heads[0]

    def of_adapter(self, name: str, shape: tuple[int, ...], *, rank: int, recompute: Recompute) -> int:
        """What an adapter beside a linear layer of this name and shape [out, in] on a rank keeps."""
        if recompute == "full":
            return 0
        is_copied = self.backend == "fsdp" and self._is_rounded and name.endswith(_READ_FLOAT32)
        given = shape[0] if recompute == "selective" else shape[1] if is_copied else 0
        return self.compute_bytes * (given + rank)

    @property
    def before(self) -> int:
        """Bytes before the first layer: the inputs of the tokens of a row, and rotations."""
        return self.dims.cp * _INPUT_BYTES + 2 * FLOAT32_BYTES * self.sizes.head_dim

    @property
    def embedded(self) -> int:
        """What there is when the first layer begins."""
        return self.before + FLOAT32_BYTES * self.sizes.hidden_size

    def after(self, is_training: bool) -> int:
        """What is kept after the last layer: the last norm's input, that normalized, and its scale."""
        if self.backend == "fsdp":  # without gradients the head reads all that is left
            return FLOAT32_BYTES * (2 * self.sizes.hidden_size + 1) if is_training else 0
        return -(-(2 * self.compute_bytes * self.sizes.hidden_size + FLOAT32_BYTES) // self.dims.tp)

    @property
    def always(self) -> int:
        """What Megatron gathers the tokens of a row in where ranks share a layer, and keeps for the next time."""
        return self.compute_bytes * self.sizes.hidden_size if self.backend == "megatron" and self.dims.tp > 1 else 0

    def again(self, layer: int, recompute: Recompute) -> int:
        """What is there once more when the backward pass comes to one layer, since it is computed again."""
        if recompute == "none":
            return 0
        kept = self._stream
        if recompute == "selective":  # of what products gave that was kept, and need not be there twice
            kept += self.compute_bytes * (sum(self._widths) + 2 * self._inner(layer)) + FLOAT32_BYTES * self._heads[0]
        return max(0, self.works_in(layer) - kept)

    def gradients_in(self, layer: int) -> int:
        """Gradients of what one layer computes, at the worst moment of its backward pass: within its MLP.

        That of the layer's result is there, and where gate and up were multiplied that of the product has become two,
        while what came after it has been let go. Of experts there are their results' gradient, that of these before
        they were weighed, and the product that is added up to the weights' own; with megatron, where the layer is
        computed again, rows as they are sent, as they came, as they are sent back, and the gradient that waits.
        """
        sizes = self.sizes
        if layer in sizes.sparse_layers:
            rows = (3 if self.backend == "fsdp" else 4) * self.compute_bytes * sizes.hidden_size
            return self._stream + sizes.experts_per_token * (rows + _INDICES_PER_EXPERT * _INDEX_BYTES)
        return self._stream + 2 * self.compute_bytes * self._inner(layer)

    def passes_through(self, layer: int) -> int:
        """What one layer needs of which nothing is kept, at its worst moment."""
        sizes, low, stream, (queries, keys) = self.sizes, self.compute_bytes, self._stream, self._widths
        if self.backend == "megatron":
            return self._passes_through_megatron(layer)
        # The stream as it was before the first layer, before this one and after its attention, and that normalized.
        rotated = 3 * FLOAT32_BYTES * queries  # times cosine, times sine, and the sum, all with what they are made of
        read = (FLOAT32_BYTES if sizes.has_head_norms else low) * queries
        attention = 3 * stream + rotated + read + 2 * low * keys * self._key_copies()
        if layer not in sizes.sparse_layers:
            return max(attention, 4 * stream + 3 * low * self._inner(layer))
        hidden, inner = sizes.hidden_size, sizes.expert_size
        experts = low * sizes.experts_per_token * max(hidden + 2 * inner, 4 * inner, 2 * hidden)
        chosen = 2 * FLOAT32_BYTES * sizes.num_experts + sizes.experts_per_token * _INDICES_PER_EXPERT * _INDEX_BYTES
        return max(attention, 5 * stream + low * hidden + experts + chosen)

    def head(
        self, output: Output, *, tokens: int, has_gradient: bool, is_weight_low: bool = False, is_trained: bool = False
    ) -> int:
        """Bytes that the last layer takes: a chunk of logits at a time, and its weight as products take it.

        Two float32 copies of a chunk exist at the worst moment, and in the backward pass one that is rounded besides;
        hidden states come in float32, in a second copy where not all of them predict, and so does their gradient. A
        score is one number of a token, for which nothing but float32 hidden states is kept.

        Args:
            is_weight_low: whether the weight is there in the type of the products.
            is_trained: whether the weight has a gradient, which is added up in float32 and then has the weight's type.
        """
        if output == "score":
            return FLOAT32_BYTES * self.sizes.hidden_size * tokens
        vocabulary = shard_size(self.sizes.vocab_size, self.dims.tp)
        rows = min(tokens, max(1, HEAD_CHUNK_BYTES // (FLOAT32_BYTES * vocabulary)))
        chunk, rounded = FLOAT32_BYTES * rows * vocabulary, self.compute_bytes if self._is_rounded else 0
        weight = vocabulary * self.sizes.hidden_size
        chunks, copies = 2 * chunk, 0 if is_weight_low else rounded
        if has_gradient:
            # Until the last chunk's logits come there are those of the chunk before; then the gradient is rounded.
            of_weight = rounded * weight if is_trained and is_weight_low else 0
            chunks = chunk + rounded * rows * vocabulary + max(chunk, of_weight)
            copies += FLOAT32_BYTES if is_trained else 0
        return chunks + copies * weight + tokens * (self._at_head(has_gradient) + _SUMS_BYTES)

    def _at_head(self, has_gradient: bool) -> int:
        """Hidden states of a token behind the last norm: those that predict, and their gradient."""
        hidden, low = self.sizes.hidden_size, self.compute_bytes
        if self.backend == "fsdp":  # of which the norm's result is there, too, where nothing is kept
            return 2 * FLOAT32_BYTES * hidden
        gathered = low * hidden if self.dims.tp > 1 else 0
        return gathered + low * hidden + ((FLOAT32_BYTES + low) * hidden if has_gradient else 0)

    def _key_copies(self) -> int:
        """How often each head of keys is there, so that every context-parallel rank has those of its queries."""
        (queries, keys), ranks = self._heads, self.dims.cp
        if keys % ranks == 0:
            return 1
        return ranks // keys if ranks % keys == 0 else queries // keys

    def _fsdp(self, layer: int) -> int:
        sizes, compute_bytes, (heads, key_heads) = self.sizes, self.compute_bytes, self._heads
        query, key = self._widths
        is_sparse = layer in sizes.sparse_layers
        norms = 2 * FLOAT32_BYTES * ((2 if self.trains_weights else 1) * sizes.hidden_size + 1)
        copies = (4 if is_sparse else 5) if self._is_rounded else 2  # q, k, v, then the router, or gate and up
        attention = compute_bytes * (3 * query + 2 * key * self._key_copies()) + FLOAT32_BYTES * heads
        normalized = FLOAT32_BYTES + (compute_bytes if self.trains_weights else 0)
        head_norms = normalized * (query + key) + FLOAT32_BYTES * (heads + key_heads)
        mlp = 4 * compute_bytes * sizes.intermediate_size // self.dims.tp
        if is_sparse:
            numbers = 4 * sizes.expert_size + 2 * sizes.hidden_size + 1
            of_one = compute_bytes * numbers + _INDICES_PER_EXPERT * _INDEX_BYTES
            mlp = sizes.experts_per_token * of_one + FLOAT32_BYTES * sizes.num_experts
            if sizes.shared_expert_size:
                of_input = (4 if self._is_rounded else 1) * sizes.hidden_size
                mlp += compute_bytes * (4 * sizes.shared_expert_size + of_input + 1)
        whole = norms + compute_bytes * copies * sizes.hidden_size
        return whole + attention + (head_norms if sizes.has_head_norms else 0) + mlp

    def _megatron(self, layer: int) -> int:
        sizes, compute_bytes, (heads, key_heads), tp = self.sizes, self.compute_bytes, self._heads, self.dims.tp
        query, key = self._widths
        norms = 2 * (compute_bytes * sizes.hidden_size + FLOAT32_BYTES)
        inputs = 2 * compute_bytes * sizes.hidden_size
        # A part of the tokens have all of it.
        whole = -(-(norms + inputs) // tp) if self.trains_weights else -(-norms // tp) + inputs
        seen_key = key * self._key_copies()
        # Values lie in what was projected, and keep all of it, unless they were sent to other ranks of c.
        is_projected_kept = self.dims.cp == 1 or sizes.has_head_norms
        numbers = 3 * query + seen_key + 4 * sizes.head_dim
        numbers += (query + 2 * key if is_projected_kept else 0) + (seen_key if self.dims.cp > 1 else 0)
        attention = compute_bytes * numbers + FLOAT32_BYTES * heads
        if sizes.has_head_norms:
            # Queries of several heads of keys do not follow each other in what was projected, and are copied.
            read = query if key_heads > 1 else 0
            attention += compute_bytes * read + FLOAT32_BYTES * (heads + key_heads)
        if layer not in sizes.sparse_layers:
            return whole + attention + 5 * compute_bytes * self._inner(layer)
        # Of a token's experts, wherever they are: a rank has as many tokens of others as others have of its own.
        own = sizes.num_experts * (FLOAT32_BYTES + 1 + compute_bytes) + sizes.experts_per_token * 2 * _INDEX_BYTES
        numbers = sizes.experts_per_token * (sizes.hidden_size + 5 * shard_size(sizes.expert_size, tp) + 1)
        if inner := self._inner(layer):
            own += compute_bytes * (sizes.hidden_size + 1)
            numbers += 5 * inner
        return whole + attention + -(-own // tp) + compute_bytes * numbers

    def _passes_through_megatron(self, layer: int) -> int:
        """The stream before the layer and after its attention, that normalized and on its way; and the MLP's numbers.

        Of experts: rows that are sent, that came and that are sorted, and their results; gate and up, and the product.
        """
        sizes, low, tp = self.sizes, self.compute_bytes, self.dims.tp
        if layer not in sizes.sparse_layers:
            return 4 * self._stream + 5 * low * self._inner(layer)
        numbers = 4 * sizes.hidden_size + 3 * shard_size(sizes.expert_size, tp)
        chosen = 2 * sizes.num_experts * (low + 1) + 2 * sizes.experts_per_token * _INDEX_BYTES
        return 4 * self._stream + low * sizes.experts_per_token * numbers + -(-chosen // tp)
