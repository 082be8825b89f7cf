"""Sizes of a decoder, tokens of a micro-batch -> bytes that autograd keeps for the backward pass, and works in.

Tensors of one layer, for each token, with H hidden, I intermediate, Q all heads of queries, K those of keys; float32 is
4 bytes, and a product's type takes c (2 under autocast to bfloat16):

    2 norms              2 x (input H, normalized H, scale)               float32, since the residual stream is; the
                                                                          normalized only for a weight that is trained
    inputs of products   q, k, v | gate, up: H each; output: Q            c; under autocast every product has its own
                                                                          rounded copy, else those in a row share one
    attention            queries Q, keys K, values K, result Q            c; logsumexp: float32 a head
    norms of heads       input and normalized: 2 (Q + K)                  float32; under autocast one is rounded to c,
                                                                          and kept only for a weight that is trained
    MLP                  gate, activated gate, up, product: 4 I           c
    experts, each of k   gate and up 2 I, activated, product, H in, H out c
    shared expert        as an MLP; result H, how much of it 1            c; rounded: 3 more copies of the input

    adapters             r between A and B; a rounded copy of its own     c
                         of the input where that is float32: q, k, v,
                         gate, up

Found with torch.autograd.graph.saved_tensors_hooks on tiny models, and counted again so by the tests. All of that is
what a layer works in; where it is computed again in the backward pass, it keeps less until then:

    recompute: selective  its input H (float32), and what products gave: Q + 2 K, Q, H | 2 I, H, or the router's (c);
                          with shared prompts once more Q, and a head's logsumexp
    recompute: full       its input H (float32)
"""

from typing import Literal

from corral.scheduling.memory.decoder_sizes import DecoderSizes, Output

Recompute = Literal["none", "selective", "full"]
"""What layers compute again in the backward pass (workers/backends/recompute.py)."""

FLOAT32_BYTES = 4
_INDEX_BYTES = 8  # of int64
_INDICES_PER_EXPERT = 4  # which expert, and the order in which tokens are sorted by it and back
_SUMS_BYTES = 4 * FLOAT32_BYTES + 2 * _INDEX_BYTES  # of the softmax, and the token's place and label
_READ_FLOAT32 = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # the others read what a product gave
HEAD_CHUNK_BYTES = 2**28
"""Logits that the last layer makes at a time (workers/backends/chunked_head.py)."""


def share_of(number: int, tensor_parallel: int) -> int:
    """What each tensor-parallel rank has of rows or columns: an equal part, or all where there is none."""
    return number if number % tensor_parallel else number // tensor_parallel


def layer_bytes_per_token(
    sizes: DecoderSizes,
    layer: int,
    *,
    compute_bytes: int,
    trains_norms: bool = True,
    context_parallel: int = 1,
    tensor_parallel: int = 1,
) -> int:
    """What one layer keeps of one token on the rank that has it.

    Args:
        compute_bytes: of a number in matrix products: 4 or 2.
        trains_norms: not where adapters are trained in place of the weights.
        context_parallel: ranks that share the tokens of a row, and the heads of attention: keys are repeated for them.
        tensor_parallel: ranks that share heads and the MLP; what is H wide is whole on each of them.
    """
    is_rounded = compute_bytes < FLOAT32_BYTES
    is_sparse = layer in sizes.sparse_layers
    heads, key_heads = sizes.num_heads // tensor_parallel, sizes.num_key_value_heads // tensor_parallel
    query, key = heads * sizes.head_dim, key_heads * sizes.head_dim
    norms = 2 * FLOAT32_BYTES * ((2 if trains_norms else 1) * sizes.hidden_size + 1)
    copies = (4 if is_sparse else 5) if is_rounded else 2  # q, k, v, then the router, or gate and up
    inputs = compute_bytes * copies * sizes.hidden_size
    seen_key = key * head_copies(heads, key_heads, context_parallel)
    attention = compute_bytes * (3 * query + 2 * seen_key) + FLOAT32_BYTES * heads
    of_heads = (FLOAT32_BYTES + (compute_bytes if trains_norms else 0)) * (query + key) + FLOAT32_BYTES * (
        heads + key_heads
    )
    head_norms = of_heads if sizes.has_head_norms else 0
    if is_sparse:
        mlp = _experts_bytes(sizes, compute_bytes=compute_bytes)
    else:
        mlp = 4 * compute_bytes * sizes.intermediate_size // tensor_parallel
    return norms + inputs + attention + head_norms + mlp


def kept_bytes_per_token(
    sizes: DecoderSizes,
    layer: int,
    *,
    recompute: Literal["selective", "full"],
    compute_bytes: int,
    tensor_parallel: int,
    shares_prompts: bool = False,
) -> int:
    """What a layer that is computed again in the backward pass keeps of one token until then.

    Args:
        shares_prompts: whether attention has two results, of an answer and of its prompt, before they are one.
    """
    own_input = FLOAT32_BYTES * sizes.hidden_size
    if recompute == "full":
        return own_input
    heads, key_heads = sizes.num_heads // tensor_parallel, sizes.num_key_value_heads // tensor_parallel
    attention = 2 * (heads + key_heads) * sizes.head_dim + sizes.hidden_size
    mlp = 2 * share_of(sizes.intermediate_size, tensor_parallel) + sizes.hidden_size
    if layer in sizes.sparse_layers:
        mlp = sizes.num_experts  # products of experts are one operation for all of them, which is not kept
        if sizes.shared_expert_size:
            mlp += 2 * sizes.shared_expert_size + sizes.hidden_size + 1
    if shares_prompts:
        attention += heads * sizes.head_dim
        own_input += FLOAT32_BYTES * heads
    return own_input + compute_bytes * (attention + mlp) + FLOAT32_BYTES * heads


def head_copies(queries: int, keys: int, ranks: int) -> int:
    """How often each head of keys is there, so that every context-parallel rank has those of its queries."""
    if keys % ranks == 0:
        return 1
    return ranks // keys if ranks % keys == 0 else queries // keys


def _experts_bytes(sizes: DecoderSizes, *, compute_bytes: int) -> int:
    of_one = compute_bytes * (4 * sizes.expert_size + 2 * sizes.hidden_size) + _INDICES_PER_EXPERT * _INDEX_BYTES
    shared = 0
    if sizes.shared_expert_size:
        copies = 3 if compute_bytes < FLOAT32_BYTES else 0
        shared = compute_bytes * (4 * sizes.shared_expert_size + (1 + copies) * sizes.hidden_size + 1)
    return sizes.experts_per_token * (of_one + compute_bytes) + FLOAT32_BYTES * sizes.num_experts + shared


def ends_bytes_per_token(sizes: DecoderSizes) -> int:
    """What is kept of one token before the first layer and after the last: its id, rotations, and the last norm's."""
    rotations = 2 * FLOAT32_BYTES * sizes.head_dim
    return _INDEX_BYTES + rotations + FLOAT32_BYTES * (2 * sizes.hidden_size + 1)


def adapter_bytes_per_token(layer: str, shape: tuple[int, ...], *, rank: int, compute_bytes: int) -> int:
    """What an adapter beside a linear layer of this name and shape [out, in] keeps."""
    is_copied = compute_bytes < FLOAT32_BYTES and layer.endswith(_READ_FLOAT32)
    own_input = shape[1] if is_copied else 0
    return compute_bytes * (own_input + rank)


def head_bytes(
    sizes: DecoderSizes,
    output: Output,
    *,
    tokens: int,
    compute_bytes: int,
    has_gradient: bool,
    tensor_parallel: int = 1,
) -> int:
    """What the last layer of a model takes: a chunk of logits at a time, and its weight as products take it.

    Two float32 copies of a chunk exist at the worst moment; hidden states come in float32, and so does their gradient.
    A score is one number of a token, for which nothing but float32 hidden states is kept.
    """
    if output == "score":
        return FLOAT32_BYTES * sizes.hidden_size * tokens
    vocabulary = share_of(sizes.vocab_size, tensor_parallel)
    rows = min(tokens, max(1, HEAD_CHUNK_BYTES // (FLOAT32_BYTES * vocabulary)))
    chunk = 2 * rows * FLOAT32_BYTES * vocabulary
    rounded_weight = compute_bytes * vocabulary * sizes.hidden_size if compute_bytes < FLOAT32_BYTES else 0
    copies = 2 if has_gradient else 1
    return chunk + rounded_weight + tokens * (copies * FLOAT32_BYTES * sizes.hidden_size + _SUMS_BYTES)
