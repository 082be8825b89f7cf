"""Sizes of a layer, its layout -> bytes that Megatron's own layer keeps of one token for the backward pass.

Each rank of t has all tokens of a row where heads and the MLP are cut, and a part of the tokens where they are not
(sequence parallel). With H hidden, I intermediate, Q all heads of queries, K those of keys, D one head, E experts of
which k are taken, X the inner size of one, S that of a shared one; float32 is 4 bytes, and numbers of the layer take c:

    2 norms              2 x (input H, normalized H, scale)    / t            4: torch's norm computes in float32
    inputs of products   q, k, v in one; gate and up: H each   / t            c
    attention            projected Q + 2 K, rotated Q + K,     / t            c; logsumexp: 4 a head; with c > 1 the
                         result Q, and in the order of heads                  values in place of all that was projected
    rotations            cosine and sine, of queries and of    4 D            c
                         keys
    norms of heads       normalized Q + K, scales; input       / t            4; the input in float32, and else that of
                                                                              the queries, if they are not all in a row
    MLP                  gate and up 2 I, up, activated gate,  5 I / t        c
                         product
    router               chosen, weighed and sent              E (5 + c) / t
    adapters             all of the two inputs of products, not a part of the      H (1 - 1 / t) each: c
                         tokens; r between A and B of each; what is normalized     r: c
                         is not kept, as no norm is trained
    experts, each of k   H in, gate and up 2 X, activated      H + 5 X / t    c; weight: c; where it came from: 16 / t
                         gate, product twice
    shared expert, S     as an MLP; result H, how much of it   5 S / t,       c
                                                               (H + 1) / t

Found with torch.autograd.graph.saved_tensors_hooks on tiny models without a GPU, and counted again so by the tests.
Tokens are taken to be spread evenly over experts: a rank whose experts are chosen more often keeps more.
"""

from corral.scheduling.memory.activations import FLOAT32_BYTES, Recompute, head_copies, share_of
from corral.scheduling.memory.decoder_sizes import DecoderSizes
from corral.scheduling.parallel import ParallelDims

_INDEX_BYTES = 8  # of int64


def layer_bytes_per_token(
    sizes: DecoderSizes, layer: int, *, compute_bytes: int, dims: ParallelDims, trains_weights: bool = True
) -> int:
    """What one layer keeps of one token of the row that a rank works on.

    Args:
        compute_bytes: of a number of the layer, in its products and between them: 4 or 2.
        dims: of whose c a rank has a part of the row, and keeps this of each token of the part.
        trains_weights: not where adapters beside all linear layers are trained; what is between their halves is told by
            `adapter_bytes_per_token`.
    """
    is_sparse = layer in sizes.sparse_layers
    norms = 2 * FLOAT32_BYTES * ((2 if trains_weights else 1) * sizes.hidden_size + 1)
    inputs = 2 * compute_bytes * sizes.hidden_size
    if trains_weights:
        whole = -(-(norms + inputs) // dims.tp)  # a part of the tokens have all of it
    else:
        whole = -(-norms // dims.tp) + inputs
    mlp = _experts_bytes(sizes, compute_bytes, dims) if is_sparse else _mlp_bytes(sizes, compute_bytes, dims)
    return whole + _attention_bytes(sizes, compute_bytes, dims, trains_weights=trains_weights) + mlp


def kept_bytes_per_token(
    sizes: DecoderSizes,
    layer: int,
    *,
    recompute: Recompute,
    compute_bytes: int,
    dims: ParallelDims,
    trains_weights: bool = True,
) -> int:
    """What one layer keeps of it until its backward pass: all, or less where it is computed again then."""
    if recompute == "none":
        return layer_bytes_per_token(
            sizes, layer, compute_bytes=compute_bytes, dims=dims, trains_weights=trains_weights
        )
    own_input = compute_bytes * -(-sizes.hidden_size // dims.tp)
    if recompute == "full":
        return own_input
    heads, key_heads = sizes.num_heads // dims.tp, sizes.num_key_value_heads // dims.tp
    attention = 2 * (heads + key_heads) * sizes.head_dim + sizes.hidden_size
    mlp = 2 * share_of(sizes.intermediate_size, dims.tp) + sizes.hidden_size
    if layer in sizes.sparse_layers:
        mlp = -(-sizes.num_experts // dims.tp)  # grouped products are not kept (workers/backends/recompute.py)
        if sizes.shared_expert_size:
            mlp += 2 * share_of(sizes.shared_expert_size, dims.tp) + sizes.hidden_size + 1
    return own_input + compute_bytes * (attention + mlp) + FLOAT32_BYTES * heads


def adapter_bytes_per_token(own_rows: int, *, rank: int, recompute: Recompute, compute_bytes: int) -> int:
    """What one adapter keeps of a token; where its layer is computed again, what its two products gave, or nothing.

    Args:
        own_rows: of its B on this rank.
    """
    return {"none": rank, "selective": rank + own_rows, "full": 0}[recompute] * compute_bytes


def _attention_bytes(sizes: DecoderSizes, compute_bytes: int, dims: ParallelDims, *, trains_weights: bool) -> int:
    heads, key_heads = sizes.num_heads // dims.tp, sizes.num_key_value_heads // dims.tp
    query, key = heads * sizes.head_dim, key_heads * sizes.head_dim
    seen_key = key * head_copies(heads, key_heads, dims.cp)
    is_rounded = compute_bytes < FLOAT32_BYTES
    # Values lie in what was projected, and keep all of it, unless they were sent to other ranks of c.
    is_projected_kept = dims.cp == 1 or (sizes.has_head_norms and not is_rounded)
    projected = query + 2 * key if is_projected_kept else 0
    received = seen_key if dims.cp > 1 else 0
    numbers = projected + received + 3 * query + seen_key + 4 * sizes.head_dim
    head_norms = 0
    if sizes.has_head_norms:
        # Queries of several heads of keys do not follow each other in what was projected, and are copied.
        inputs = query + key if is_rounded else (query if key_heads > 1 else 0)
        normalized = query + key if trains_weights else 0
        head_norms = FLOAT32_BYTES * (normalized + inputs + heads + key_heads)
    return compute_bytes * numbers + FLOAT32_BYTES * heads + head_norms


def _mlp_bytes(sizes: DecoderSizes, compute_bytes: int, dims: ParallelDims) -> int:
    return 5 * compute_bytes * share_of(sizes.intermediate_size, dims.tp)


def _experts_bytes(sizes: DecoderSizes, compute_bytes: int, dims: ParallelDims) -> int:
    """Of a token's k experts, wherever they are: a rank has as many tokens of others as others have of its own."""
    own = sizes.num_experts * (FLOAT32_BYTES + 1 + compute_bytes) + sizes.experts_per_token * 2 * _INDEX_BYTES
    numbers = sizes.hidden_size + 5 * share_of(sizes.expert_size, dims.tp) + 1
    shared = 0
    if sizes.shared_expert_size:
        result = -(-compute_bytes * (sizes.hidden_size + 1) // dims.tp)
        shared = 5 * compute_bytes * share_of(sizes.shared_expert_size, dims.tp) + result
    return -(-own // dims.tp) + sizes.experts_per_token * compute_bytes * numbers + shared
