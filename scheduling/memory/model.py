"""One model in one layout -> bytes on each of its GPUs: a role's, as its backend holds it, and a generation server's.

                fsdp                                               megatron
 parameters     float32, cut over t by rows or columns, then by    in the type of the products: the layers of a stage,
                rows over d x c (torch's fully_shard, FSDP2), of   cut over t, their experts over t x e; embedding in
                experts along what divides (cut_dim); frozen       the first one, output in the last; float32 averages
                matrices in the type of the products               beside those of a model that follows another
 gradients      float32, cut alike; let go after each step         float32, not cut over d x c, always there
 optimizer      AdamW: two moments, a step count per tensor;       AdamW: two moments, and float32 weights where those
                Muon: one moment for the layers' matrices; in      are of another type, cut over d x c, of experts over
                host memory but for the step, after the passes     d x c / e (Megatron's distributed optimizer)
 adapters       float32, cut as their layer is                     float32; the uncut half of each is whole
 activations    what autograd keeps of all layers (layers.py), less with recompute, and what one layer works in with its
                gradients; without gradients that alone; in a pipeline for as many rows as are under way (1F1B)
 buffers        where a model is cut: its ends whole from the      where ranks share layers: tokens of a row, gathered;
                beginning to the end of a pass, a layer and the    where a call generates: all weights whole, once
                flat buffer of another, and the gradients of
                one of them as they are sent, in float32; where
                a call generates: all weights whole, in float32

A pass is at its worst in a layer, at the head, or at its end (`_moments`): what a layer works in and logits are never
both there. `_Tensor` knows the differences between backends. Each figure is that of the stage and the rank with most.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from corral.scheduling.memory.decoder_sizes import DecoderSizes, Output, Shape, tensor_shapes
from corral.scheduling.memory.gpu import PROMPT_TOKENS, ModelOnGpu, Part, Parts, answering, key_value_bytes_per_token
from corral.scheduling.memory.layers import FLOAT32_BYTES, Backend, Layers, Recompute, shard_size
from corral.scheduling.parallel import ParallelDims, stage_layers

CallKind = Literal["train", "infer", "generate"]
_LAYERS = "model.layers."
_EMBEDDING, _OUTPUTS, _SCORE = "model.embed_tokens.weight", ("lm_head.weight", "score.weight"), "score.weight"
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_EXPERTS_DIM = {"mlp.experts.gate_up_proj": 1, "mlp.experts.down_proj": 2}
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
class _Tensor:
    """A parameter, and what its backend keeps of it."""

    shape: Shape
    tensor_dim: int | None
    """The dimension that tensor-parallel ranks cut it along."""
    is_expert: bool
    is_trained: bool
    number_bytes: int
    """Of one number, while it is held."""
    gathered_bytes: int
    """The same where all ranks' parts are made whole for a layer."""
    moment_bytes: int
    """Of all that the optimizer keeps of one number."""
    step_count_bytes: int

    def part(self, dims: ParallelDims) -> Shape:
        """The shape on each tensor-parallel and expert-parallel rank."""
        cut = [shard_size(size, dims.tp) if dim == self.tensor_dim else size for dim, size in enumerate(self.shape)]
        return (-(-cut[0] // dims.ep), *cut[1:]) if self.is_expert else tuple(cut)

    def whole(self, dims: ParallelDims) -> int:
        """Numbers of that part."""
        return math.prod(self.part(dims))

    def sharded(self, dims: ParallelDims) -> int:
        """Numbers of that part on the rank with most, if the ranks that have the same part shard it."""
        part, ranks = self.part(dims), dims.dp * dims.cp // (dims.ep if self.is_expert else 1)
        dim = cut_dim(part, ranks)
        return math.prod(part) // part[dim] * -(-part[dim] // ranks)


class _Tensors(NamedTuple):
    """Of a whole model."""

    ends: dict[str, _Tensor]
    """What is outside of layers, by name."""
    kinds: list[tuple[_Tensor, ...]]
    """What layers hold, adapters included: one for all that hold the same."""
    kind_of_layer: list[int]


class _Buffers(NamedTuple):
    """Bytes of copies that come and go in a pass, of a model that is cut over ranks."""

    in_layer: int
    """The layer that computes, and the flat buffer of the one that is gathered or was read last."""
    at_head: int = 0
    """The output, and its flat buffer or that of a layer: the last one is gathered while the head has gradients."""
    at_begin: int = 0
    """What is read first, and the first layer: whole, and in the flat buffers that they came in."""
    at_end: int = 0
    """The embedding's gradient as it is made, and as it is sent."""


@dataclass(frozen=True, kw_only=True)
class RoleModel:
    """The model of a role, whatever its layout: computed once, asked for many layouts."""

    sizes: DecoderSizes
    backend: Backend = "fsdp"
    output: Output = "vocabulary"
    optimizer: Literal["adamw", "muon"] | None = None
    """None for a model that is only read."""
    adapters: Adapters | None = None
    """What is trained in place of the weights; a score layer is trained beside them."""
    compute_bytes: int = FLOAT32_BYTES
    """Of a number in matrix products: 4 or 2."""
    recompute: Recompute = "none"
    follows: bool = False
    """Whether it is a moving average of another model."""
    sums_gradients_once: bool = False
    """Whether a rank keeps whole gradients until the last micro-batch of a step."""
    shares_prompts: bool = False
    """Whether rows may have prompts once."""
    hosts_optimizer: bool = False
    """Whether moments lie in host memory."""
    is_held_low: bool = False
    """Whether a model that is only read is held in the type of the products."""

    def on_gpu(self, name: str, dims: ParallelDims, calls: Sequence[CallSizes]) -> ModelOnGpu:
        """What each of the model's GPUs has to hold.

        Args:
            calls: on this model, with the tokens of one data-parallel rank.
        """
        working = {call.name: self._working(call, dims) for call in calls}
        return ModelOnGpu(name=name, held=self._held(dims), working=working)

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        return tensor_shapes(self.sizes, self.output)

    @cached_property
    def _tensors(self) -> "_Tensors":
        ends: dict[str, _Tensor] = {}
        layers: list[list[_Tensor]] = [[] for _ in range(self.sizes.num_layers)]
        adapted = self.adapters.layers if self.adapters is not None else frozenset[str]()
        for name, shape in self._shapes.items():
            if not name.startswith(_LAYERS):
                ends[name] = self._tensor(name, shape)
                continue
            layer = layers[int(name.split(".")[2])]
            layer.append(self._tensor(name, shape))
            if self.adapters is not None and name.removesuffix(".weight") in adapted:
                rank, dim = self.adapters.rank, _tensor_dim(name)
                layer.append(self._tensor(name, (rank, shape[1]), is_adapter=True, tensor_dim=1 if dim == 1 else None))
                layer.append(self._tensor(name, (shape[0], rank), is_adapter=True, tensor_dim=0 if dim == 0 else None))
        number_by_kind = {kind: number for number, kind in enumerate(dict.fromkeys(map(tuple, layers)))}
        return _Tensors(ends, list(number_by_kind), [number_by_kind[tuple(layer)] for layer in layers])

    def _tensor(self, name: str, shape: Shape, *, is_adapter: bool = False, tensor_dim: int | None = None) -> _Tensor:
        in_layer = name.startswith(_LAYERS)
        trains_weights = self.optimizer is not None and self.adapters is None
        is_trained = trains_weights or is_adapter or (self.adapters is not None and name == _SCORE)
        is_low = self.compute_bytes < FLOAT32_BYTES
        if self.backend == "fsdp":
            # Frozen matrices may be held in the type of the products; embeddings and the router's are not.
            is_product = name.endswith(("_proj.weight", "lm_head.weight", "_gate.weight")) or len(shape) == 3
            holds_low = (self.is_held_low or self.adapters is not None) and is_product and not is_trained
            beside, moments = 0, 1 if self.optimizer == "muon" and in_layer and len(shape) >= 2 else 2
        else:
            holds_low = trains_weights or not is_trained
            beside, moments = FLOAT32_BYTES if is_low and self.follows else 0, 3 if is_low and holds_low else 2
        return _Tensor(
            shape=shape,
            tensor_dim=tensor_dim if is_adapter else _tensor_dim(name),
            is_expert=".mlp.experts." in name,
            is_trained=is_trained,
            number_bytes=(self.compute_bytes if holds_low else FLOAT32_BYTES) + beside,
            gathered_bytes=self.compute_bytes if in_layer or name == "lm_head.weight" else FLOAT32_BYTES,
            moment_bytes=FLOAT32_BYTES * moments if is_trained else 0,
            step_count_bytes=_STEP_COUNT_BYTES if is_trained and self.backend == "fsdp" and moments == 2 else 0,
        )

    def _sum(self, dims: ParallelDims, amount: Callable[[_Tensor], int]) -> int:
        """Of all tensors of the stage with most."""
        ends, kinds, kind_of_layer = self._tensors
        of_kind = [sum(map(amount, kind)) for kind in kinds]
        in_all = []
        for stage, layers in enumerate(stage_layers(self.sizes.num_layers, dims.pp)):
            is_last = stage == dims.pp - 1
            own = [one for name, one in ends.items() if (stage == 0 if name == _EMBEDDING else is_last)]
            if is_last and stage and not any(name in ends for name in _OUTPUTS):
                own.append(ends[_EMBEDDING])  # a tied output is a copy of the embedding there
            in_all.append(sum(map(amount, own)) + sum(of_kind[kind_of_layer[layer]] for layer in layers))
        return max(in_all)

    def _held(self, dims: ParallelDims) -> Parts:
        held = _Tensor.sharded if self.backend == "fsdp" else _Tensor.whole
        parts: dict[Part, int] = {"parameters": self._sum(dims, lambda one: one.number_bytes * held(one, dims))}
        if self.optimizer is not None and self.backend == "megatron":
            parts["gradients"] = self._gradients(dims, is_cut=False)
        if self.optimizer is not None:
            parts["optimizer"] = self._sum(
                dims,
                lambda one: (
                    one.step_count_bytes + (0 if self.hosts_optimizer else one.moment_bytes * one.sharded(dims))
                ),
            )
        return parts

    def _gradients(self, dims: ParallelDims, *, is_cut: bool) -> int:
        return self._sum(
            dims, lambda one: FLOAT32_BYTES * (one.sharded(dims) if is_cut else one.whole(dims)) * one.is_trained
        )

    def _working(self, call: CallSizes, dims: ParallelDims) -> Parts:
        if call.kind == "generate":
            return self._generating(call, dims)
        moments = self._moments(self._layers(dims), tokens=-(-call.tokens // dims.cp), is_training=call.kind == "train")
        return max(moments, key=lambda parts: sum(parts.values()))

    def _moments(self, layers: Layers, *, tokens: int, is_training: bool) -> Iterator[Parts]:
        """What there is when a pass may be at its worst: in a layer, at the head, and with hardly any activations."""
        dims, buffers = layers.dims, self._buffers(layers.dims, is_training=is_training)
        always = Counter[Part]({"buffers": tokens * layers.always})
        if is_training and self.backend == "fsdp":
            always["gradients"] = self._gradients(dims, is_cut=not self.sums_gradients_once)
        kept = self._kept_by_stage(layers) if is_training else [0]
        in_layer = tokens * (max(kept) + layers.before + self._in_layer(layers, is_training=is_training))
        yield always + Counter({"activations": in_layer, "buffers": buffers.in_layer})
        head = layers.head(
            self.output,
            tokens=tokens,
            has_gradient=is_training,
            is_weight_low=self._is_head_low(dims),
            is_trained=is_training and self.adapters is None,
        )
        at_head = tokens * (kept[-1] + layers.before + layers.after(is_training))
        yield always + Counter({"activations": at_head, "head": head, "buffers": buffers.at_head})
        yield always + Counter({"activations": tokens * layers.embedded, "buffers": buffers.at_begin})
        if is_training:
            yield always + Counter({"buffers": buffers.at_end})
            if self.hosts_optimizer:  # moments come when the passes have let go of all this
                moments = self._sum(dims, lambda one: one.moment_bytes * one.sharded(dims))
                yield always + Counter({"optimizer": moments})

    def _is_head_low(self, dims: ParallelDims) -> bool:
        """Whether the output's weight is in the type of the products when it is used."""
        output = self._tensors.ends.get("lm_head.weight")
        if self.backend == "megatron":
            return self.compute_bytes < FLOAT32_BYTES
        is_cut = dims.dp * dims.cp > 1
        return output is not None and (output.gathered_bytes if is_cut else output.number_bytes) < FLOAT32_BYTES

    def _layers(self, dims: ParallelDims) -> Layers:
        return Layers(
            sizes=self.sizes,
            backend=self.backend,
            dims=dims,
            compute_bytes=self.compute_bytes,
            trains_weights=self.adapters is None,
            shares_prompts=self.shares_prompts and self.backend == "fsdp",
        )

    def _kept_by_stage(self, layers: Layers) -> list[int]:
        """Of one token, until the backward pass: by all layers of a stage, for as many rows as are under way in it."""
        sparse = self.sizes.sparse_layers
        kept_by_kind = {layer in sparse: layers.kept(layer, self.recompute) for layer in self.sizes.layer_kinds}
        kept = [kept_by_kind[layer in sparse] for layer in range(self.sizes.num_layers)]
        for layer, size in self._of_adapters(layers, self.recompute):
            kept[layer] += size
        stages = stage_layers(self.sizes.num_layers, layers.dims.pp)
        return [sum(kept[layer] for layer in own) * (len(stages) - stage) for stage, own in enumerate(stages)]

    def _in_layer(self, layers: Layers, *, is_training: bool) -> int:
        """Of one token, beside what all layers keep: while the layer that needs most computes, or has its gradients."""
        kinds = self.sizes.layer_kinds
        if not is_training:
            return max(map(layers.passes_through, kinds))
        works_in = max(layers.again(layer, self.recompute) + layers.gradients_in(layer) for layer in kinds)
        if self.recompute != "none" and self.adapters is not None:
            works_in += sum(size for _, size in self._of_adapters(layers, "none")) // self.sizes.num_layers
        return works_in

    def _of_adapters(self, layers: Layers, recompute: Recompute) -> Iterator[tuple[int, int]]:
        """Of each adapter: its layer, and what it keeps of a token."""
        if self.adapters is None:
            return
        for name in self.adapters.layers:
            shape = self._tensor(f"{name}.weight", self._shapes[f"{name}.weight"]).part(layers.dims)
            yield (
                int(name.split(".")[2]),
                layers.of_adapter(name, shape, rank=self.adapters.rank, recompute=recompute),
            )

    def _buffers(self, dims: ParallelDims, *, is_training: bool) -> _Buffers:
        """Whole copies of what is cut; where nothing is, the experts of a layer in the type of their products."""
        ends, kinds, _ = self._tensors
        if self.backend == "megatron" or dims.dp * dims.cp == 1:
            # Megatron's of a model that is trained are one tensor, which is not copied.
            is_cast = self.optimizer is None or self.backend == "fsdp"
            low = self.compute_bytes if self.backend == "fsdp" else 0
            held = (one for kind in kinds for one in kind if one.is_expert and is_cast and one.number_bytes > low)
            # A gradient is made in the type of products, then has the weight's beside the one that is there.
            each = self.compute_bytes + FLOAT32_BYTES * (self.optimizer is not None)
            return _Buffers(in_layer=max((each * one.whole(dims) for one in held), default=0))

        def gathered(tensors: Iterable[_Tensor]) -> int:
            return sum(one.gathered_bytes * one.whole(dims) for one in tensors)

        def gradient(tensors: Iterable[_Tensor]) -> int:
            return sum(FLOAT32_BYTES * one.whole(dims) * one.is_trained for one in tensors)

        output = [one for name, one in ends.items() if name == "lm_head.weight"]
        others = [one for name, one in ends.items() if name != "lm_head.weight"]
        # What is outside of layers is whole from the beginning to the end of a pass, but for an output of its own.
        always, at_head, layer = gathered(others), gathered(output), max(map(gathered, kinds))
        beside = at_head  # without gradients the next pass needs the output, too, to the end of the last
        if is_training:
            # Of what came before a layer, or of the output, which is sent while the layer computes; a tied output's
            # gradient is the embedding's, which is there from the head to the end.
            sent = max(max(map(gradient, kinds)), gradient(output) if output else gradient(others))
            numbers = (one.whole(dims) * one.is_trained for kind in kinds for one in kind if not one.is_expert)
            beside = sent + self.compute_bytes * max(numbers)  # a layer's last matrix is the first to have one
        return _Buffers(
            in_layer=always + 2 * layer + beside,
            at_head=always + at_head + (layer if is_training else max(at_head, layer)),
            at_begin=2 * (always + layer),
            at_end=always + 2 * gradient(others),
        )

    def _generating(self, call: CallSizes, dims: ParallelDims) -> Parts:
        number_bytes = FLOAT32_BYTES if self.backend == "fsdp" else self.compute_bytes
        is_mixed = self.adapters is not None and self.compute_bytes < FLOAT32_BYTES
        has_copy = self.backend == "megatron" or dims.world_size > 1 or is_mixed
        whole = sum(math.prod(shape) for shape in self._shapes.values())
        longest = -(-call.tokens // max(1, call.sequences))
        tokens = min(call.tokens, max(PROMPT_TOKENS, longest))
        held: dict[Part, int] = {
            "KV cache": key_value_bytes_per_token(self.sizes, number_bytes=number_bytes) * call.tokens,
            "buffers": number_bytes * whole if has_copy else 0,
        }
        return held | dict(answering(self.sizes, number_bytes=number_bytes, tokens=tokens, requests=call.sequences))


def cut_dim(shape: Shape, ranks: int) -> int:
    """The dimension that a parameter is cut along: its rows, which need not divide, unless it is experts' matrices.

    These are few and large: 128 of them are 6 on most of 24 ranks and none on two. The ranks share them equally along
    any dimension that divides, if one does.
    """
    if len(shape) < 3:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def _tensor_dim(name: str) -> int | None:
    """Rows or columns that tensor-parallel ranks share (tensor_parallel.py); None of what each of them has whole."""
    experts = next((dim for experts, dim in _EXPERTS_DIM.items() if name.endswith(experts)), None)
    if experts is not None:
        return experts
    module = name.rpartition(".")[0]
    if module.endswith(_BY_ROWS):
        return 0
    return 1 if module.endswith(_BY_COLUMNS) and name.endswith(".weight") else None
