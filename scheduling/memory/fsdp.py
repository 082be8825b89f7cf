"""One role's model in one layout -> bytes on each of its GPUs, as the fsdp backend holds it.

    parameters   float32, cut over t tensor-parallel ranks by rows or columns,      tensor_parallel.py
                 then by rows over d x c ranks: ceil(rows / ranks) each, and        torch's fully_shard (FSDP2)
                 experts' matrices along a dimension that divides (`cut_dim`)
                 frozen matrices, beside adapters or of a role that nothing         workers/backends/lora.py
                 trains: in the type of the products
    gradients    float32, cut alike, of what is trained; let go after each step     MeshEngine.train_batch
    optimizer    AdamW: two moments, and a step count per tensor                    workers/backends/fsdp/optimizers.py
                 Muon: one moment for the matrices of the layers
                 in host memory: that of two tensors at a time, in a train step         workers/backends/hosted_state.py
    activations  what autograd keeps of all layers, less with recompute, and one    scheduling/memory/activations.py
                 layer's worth to work in; without gradients that alone
    buffers      where a model is cut: its ends whole from the beginning of a       FSDP2: the outermost module stays
                 forward pass to the end of the backward one, three layers whole,   whole, and the next layer comes
                 and the gradients of the ends and of one layer before they         while one computes
                 are reduced, in float32; layers and an output of its own are
                 gathered in the type of the products
                 where a call generates: all weights whole, in float32, if they     workers/engine/decoder/decoder.py
                 are cut or of another type

Each figure is that of the rank with most: the last ones may have a row less of a tensor.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from corral.scheduling.memory.activations import (
    FLOAT32_BYTES,
    Recompute,
    adapter_bytes_per_token,
    ends_bytes_per_token,
    head_bytes,
    kept_bytes_per_token,
    layer_bytes_per_token,
    share_of,
)
from corral.scheduling.memory.decoder_sizes import DecoderSizes, Output, Shape, tensor_shapes
from corral.scheduling.memory.gpu import ModelOnGpu, Part, Parts
from corral.scheduling.parallel import ParallelDims

CallKind = Literal["train", "infer", "generate"]
_LAYERS = "model.layers."
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_LAYERS_WHOLE = 3  # the one that computes, the next, which is gathered meanwhile, and the flat buffer of that
_STEP_COUNT_BYTES = 4  # of AdamW, a float32 for each tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters beside linear layers."""

    rank: int
    layers: frozenset[str]
    """Names of the linear layers that have one, such as model.layers.0.self_attn.q_proj."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """One call on the model, as large as it gets on one rank."""

    name: str
    kind: CallKind
    tokens: int
    """Of a whole micro-batch, which context-parallel ranks share; where it generates, of all answers that are made at a
    time, prompts included."""
    sequences: int = 1
    """Answers that are made at a time, where it generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensors:
    """Parameters of one kind."""

    shape: Shape
    count: int
    bytes_each: int
    """Of one number."""
    bytes_gathered: int
    """The same where all ranks' parts are made whole for a layer."""
    is_trained: bool
    in_layer: bool
    has_two_moments: bool
    """Whether AdamW updates it."""
    tensor_dim: int | None
    """The dimension that tensor-parallel ranks cut it along."""

    def part(self, dims: ParallelDims) -> Shape:
        """What tensor-parallel ranks leave each other, before its rows are cut."""
        return tuple(share_of(size, dims.tp) if dim == self.tensor_dim else size for dim, size in enumerate(self.shape))

    def numbers(self, dims: ParallelDims) -> int:
        """Of one such tensor on one rank: as much as the rank with most."""
        part, ranks = self.part(dims), _num_cuts(dims)
        dim = cut_dim(part, ranks)
        return math.prod(part) // part[dim] * -(-part[dim] // ranks)

    def moments(self, dims: ParallelDims) -> int:
        """Bytes that the optimizer keeps of one such tensor on one rank."""
        return (2 if self.has_two_moments else 1) * FLOAT32_BYTES * self.numbers(dims)


class RoleModel:
    """The model of a role, whatever its layout: computed once, asked for many layouts."""

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        output: Output = "vocabulary",
        optimizer: Literal["adamw", "muon"] | None = None,
        adapters: Adapters | None = None,
        compute_bytes: int = FLOAT32_BYTES,
        recompute: Recompute = "none",
        sums_gradients_once: bool = False,
        shares_prompts: bool = False,
        hosts_optimizer: bool = False,
        is_held_low: bool = False,
    ) -> None:
        """
        Args:
            optimizer: None for a model that is only read.
            adapters: what is trained in place of the weights; a score layer is trained beside them.
            compute_bytes: of a number in matrix products: 4 or 2.
            sums_gradients_once: whether a rank keeps whole gradients until the last micro-batch of a step.
            shares_prompts: whether rows may have prompts once.
            hosts_optimizer: whether moments lie in host memory.
            is_held_low: whether a model that is only read is held in the type of the products.
        """
        self.sizes = sizes
        self._output = output
        self._adapters = adapters
        self._optimizer = optimizer
        self._compute_bytes = compute_bytes
        self._recompute = recompute
        self._sums_gradients_once = sums_gradients_once
        self._shares_prompts = shares_prompts
        self._hosts_optimizer = hosts_optimizer
        self._holds_frozen_low = is_held_low or adapters is not None
        self._shapes = tensor_shapes(sizes, output)
        counts = Counter(self._kinds())
        self._tensors = [
            _Tensors(
                shape=shape,
                count=count,
                bytes_each=bytes_each,
                bytes_gathered=bytes_gathered,
                is_trained=is_trained,
                in_layer=in_layer,
                has_two_moments=not (optimizer == "muon" and in_layer and len(shape) >= 2),
                tensor_dim=tensor_dim,
            )
            for (shape, bytes_each, bytes_gathered, is_trained, in_layer, tensor_dim), count in counts.items()
        ]

    def _kinds(self) -> list[tuple[Shape, int, int, bool, bool, int | None]]:
        """What distinguishes a parameter from others, in the order of `_Tensors`, of every one."""
        trains_weights = self._optimizer is not None and self._adapters is None
        adapted = self._adapters.layers if self._adapters is not None else frozenset[str]()
        kinds = []
        for name, shape in self._shapes.items():
            in_layer = name.startswith(_LAYERS)
            is_trained = trains_weights or (self._adapters is not None and name == "score.weight")
            number_bytes = self._bytes_of(name, shape, is_trained=is_trained)
            gathered = self._compute_bytes if in_layer or name == "lm_head.weight" else FLOAT32_BYTES
            kinds.append((shape, number_bytes, gathered, is_trained, in_layer, _tensor_dim(name)))
            if self._adapters is not None and name.removesuffix(".weight") in adapted:
                rank, dim = self._adapters.rank, _tensor_dim(name)
                halves = (((rank, shape[1]), dim if dim == 1 else None), ((shape[0], rank), dim if dim == 0 else None))
                kinds += [(half, FLOAT32_BYTES, self._compute_bytes, True, True, cut) for half, cut in halves]
        return kinds

    def _bytes_of(self, name: str, shape: Shape, *, is_trained: bool) -> int:
        """Frozen matrices may be held in the type of the products; embeddings and the router's are not."""
        is_product = name.endswith(("_proj.weight", "lm_head.weight", "_gate.weight")) or len(shape) == 3
        held_low = self._holds_frozen_low and is_product and not is_trained
        return self._compute_bytes if held_low else FLOAT32_BYTES

    @property
    def num_parameters(self) -> int:
        """Without adapters."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    def on_gpu(self, name: str, dims: ParallelDims, calls: list[CallSizes]) -> ModelOnGpu:
        """What each of the model's GPUs has to hold.

        Args:
            dims: the layout.
            calls: on this model, with the tokens of one data-parallel rank.
        """
        held = self._held(dims)
        return ModelOnGpu(name=name, held=held, working={call.name: self._working(call, dims) for call in calls})

    def _held(self, dims: ParallelDims) -> Parts:
        parts: dict[Part, int] = {"parameters": self._sum(dims, trained_only=False)}
        if self._optimizer is not None:
            parts["optimizer"] = self._step_count_bytes()
            if not self._hosts_optimizer:
                parts["optimizer"] += sum(tensors.count * tensors.moments(dims) for tensors in self._trained())
        return parts

    def _sum(self, dims: ParallelDims, *, trained_only: bool) -> int:
        return sum(
            tensors.count * tensors.bytes_each * tensors.numbers(dims)
            for tensors in self._tensors
            if tensors.is_trained or not trained_only
        )

    def _trained(self) -> list[_Tensors]:
        return [tensors for tensors in self._tensors if tensors.is_trained]

    def _step_count_bytes(self) -> int:
        return sum(tensors.count * _STEP_COUNT_BYTES for tensors in self._trained() if tensors.has_two_moments)

    def _moments_on_their_way(self, dims: ParallelDims) -> int:
        """Of the tensor that is stepped, and of the next one; at worst the largest two follow each other."""
        by_size = sorted(((tensors.moments(dims), tensors.count) for tensors in self._trained()), reverse=True)
        largest = [size for size, count in by_size for _ in range(min(2, count))]
        return sum(largest[:2])

    def _working(self, call: CallSizes, dims: ParallelDims) -> Parts:
        if call.kind == "generate":
            return self._generating(call, dims)
        is_training = call.kind == "train"
        tokens = -(-call.tokens // dims.cp)
        parts: dict[Part, int] = {
            "activations": self._activations(tokens, dims, is_training=is_training),
            "head": self._head(tokens, dims, is_training=is_training),
            "buffers": self._gathered(dims, is_training=is_training),
        }
        if is_training:
            parts["gradients"] = self._gradient_bytes(dims)
            if self._hosts_optimizer:
                parts["optimizer"] = self._moments_on_their_way(dims)
        return parts

    def _gradient_bytes(self, dims: ParallelDims) -> int:
        if not self._sums_gradients_once:
            return self._sum(dims, trained_only=True)
        return sum(FLOAT32_BYTES * tensors.count * math.prod(tensors.part(dims)) for tensors in self._trained())

    def _activations(self, tokens: int, dims: ParallelDims, *, is_training: bool) -> int:
        sizes, recompute = self.sizes, self._recompute
        works_in = max(self._layer(layer, dims) for layer in sizes.layer_kinds)
        if not is_training:
            return tokens * works_in
        ends = ends_bytes_per_token(sizes)
        if recompute == "none":
            layers = sum(self._layer(layer, dims) for layer in range(sizes.num_layers))
            return tokens * (layers + self._adapter_bytes_per_token() + ends + works_in)
        kept = sum(
            kept_bytes_per_token(
                sizes,
                layer,
                recompute=recompute,
                compute_bytes=self._compute_bytes,
                tensor_parallel=dims.tp,
                shares_prompts=self._shares_prompts,
            )
            for layer in range(sizes.num_layers)
        )
        # The layer whose backward pass it is has all of its own again, and lets go of it while it works.
        return tokens * (kept + ends + works_in + self._adapter_bytes_per_token() // sizes.num_layers)

    def _layer(self, layer: int, dims: ParallelDims) -> int:
        return layer_bytes_per_token(
            self.sizes,
            layer,
            compute_bytes=self._compute_bytes,
            trains_norms=self._adapters is None,
            context_parallel=dims.cp,
            tensor_parallel=dims.tp,
        )

    def _adapter_bytes_per_token(self) -> int:
        if self._adapters is None:
            return 0
        return sum(
            adapter_bytes_per_token(
                layer, self._shapes[f"{layer}.weight"], rank=self._adapters.rank, compute_bytes=self._compute_bytes
            )
            for layer in self._adapters.layers
        )

    def _head(self, tokens: int, dims: ParallelDims, *, is_training: bool) -> int:
        return head_bytes(
            self.sizes,
            self._output,
            tokens=tokens,
            compute_bytes=self._compute_bytes,
            has_gradient=is_training,
            tensor_parallel=dims.tp,
        )

    def _gathered(self, dims: ParallelDims, *, is_training: bool) -> int:
        """Whole copies of what is cut; none where nothing is."""
        if _num_cuts(dims) == 1:
            return 0
        ends = layers = 0
        for tensors in self._tensors:
            numbers = tensors.count * math.prod(tensors.part(dims))
            of_gradient = FLOAT32_BYTES * numbers if is_training and tensors.is_trained else 0
            if tensors.in_layer:
                layers += _LAYERS_WHOLE * tensors.bytes_gathered * numbers + of_gradient
            else:
                ends += tensors.bytes_gathered * numbers + of_gradient
        return ends + layers // self.sizes.num_layers

    def _generating(self, call: CallSizes, dims: ParallelDims) -> Parts:
        sizes = self.sizes
        has_copy = dims.world_size > 1 or (self._adapters is not None and self._compute_bytes < FLOAT32_BYTES)
        rows_of_logits = 2 * FLOAT32_BYTES * sizes.vocab_size * call.sequences
        return {
            "KV cache": key_value_bytes_per_token(sizes, number_bytes=FLOAT32_BYTES) * call.tokens,
            "head": rows_of_logits,
            "buffers": FLOAT32_BYTES * self.num_parameters if has_copy else 0,
        }


def key_value_bytes_per_token(sizes: DecoderSizes, *, number_bytes: int, tensor_parallel: int = 1) -> int:
    """Keys and values of one token in all layers; where there are more ranks than heads, each has a copy of one."""
    heads = -(-sizes.num_key_value_heads // tensor_parallel)
    return 2 * sizes.num_layers * heads * sizes.head_dim * number_bytes


def cut_dim(shape: Shape, ranks: int) -> int:
    """The dimension that a parameter is cut along: its rows, which need not divide, unless it is experts' matrices.

    These are few and large: 128 of them are 6 on most of 24 ranks and none on two. The ranks share them equally along
    any dimension that divides, if one does.
    """
    if len(shape) < 3:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def _num_cuts(dims: ParallelDims) -> int:
    """Ranks that a parameter's rows are cut over."""
    return dims.world_size // (dims.tp * dims.pp)


def _tensor_dim(name: str) -> int | None:
    """Rows or columns that tensor-parallel ranks share (tensor_parallel.py); None of what each of them has whole."""
    module = name.rpartition(".")[0]
    if module.endswith(_BY_ROWS):
        return 0
    return 1 if module.endswith(_BY_COLUMNS) and name.endswith(".weight") else None
