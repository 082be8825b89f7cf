"""One role's model in one layout -> bytes on each of its GPUs, as the megatron backend holds it.

    parameters   in the type of the products: the layers of a stage, cut over t,    model.py
                 their experts over t x e; the embedding in the first one, the
                 output in the last
    gradients    float32 of all of that, always there                               optimizer.py: with_gradients
    optimizer    AdamW: two moments of a share of it, one for each of d x c ranks,  Megatron's distributed optimizer
                 of experts for each of d x c / e, and float32 weights beside,
                 where products are of another type
    adapters     float32, the uncut half of each whole; gradients and optimizer     lora.py
                 are of them, and of a score layer, alone
    activations  what autograd keeps of the stage's layers, less with recompute,    pipeline.py: 1F1B
                 for as many micro-batches as are under way in the first stage,     scheduling/memory/megatron_layers.py
                 and one layer's worth to work in; without gradients that alone
    buffers      where a call generates: all weights whole, once                    engine.py: MegatronEngine.model
    KV cache     keys and values of the answers that it generates at a time         workers/model/generator.py

The files are those of workers/backends/megatron.
Each figure is that of the stage with most: the first or the last.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from corral.scheduling.memory.activations import FLOAT32_BYTES, Recompute, head_bytes, share_of
from corral.scheduling.memory.decoder_sizes import DecoderSizes, Output, Shape, tensor_shapes
from corral.scheduling.memory.fsdp import Adapters, CallSizes, key_value_bytes_per_token
from corral.scheduling.memory.gpu import ModelOnGpu, Part, Parts
from corral.scheduling.memory.megatron_layers import (
    adapter_bytes_per_token,
    kept_bytes_per_token,
    layer_bytes_per_token,
)
from corral.scheduling.parallel import ParallelDims, stage_layers

_Place = Literal["layer", "expert", "embedding", "output", "last norm"]
"""Of a parameter within the model."""
_MATRIX = 2  # dimensions; norms and biases, which have one, count as whole on every rank
_LAYERS = "model.layers."
_EMBEDDING, _OUTPUT, _SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
_EXPERTS, _ROUTER, _SHARED_GATE = ".mlp.experts.", ".mlp.gate.weight", ".mlp.shared_expert_gate.weight"
_BY_COLUMNS = ("o_proj", "down_proj")  # the other linear layers are cut by rows
_Counts: TypeAlias = Counter[tuple[_Place, int, bool]]
"""How many parameters there are of each kind: see `_kind_of`."""


class MegatronModel:
    """The model of a role, whatever its layout."""

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        output: Output = "vocabulary",
        is_trained: bool,
        follows: bool = False,
        adapters: Adapters | None = None,
        compute_bytes: int = FLOAT32_BYTES,
        recompute: Recompute = "none",
    ) -> None:
        """
        Args:
            follows: whether it is a moving average of another model, which is float32 beside weights of a lower type.
            adapters: what is trained in place of the weights; a score layer is trained beside them.
            compute_bytes: of a number in matrix products: 4 or 2.
        """
        self.sizes = sizes
        self._output = output
        self._is_trained = is_trained
        self._has_averages = follows and compute_bytes < FLOAT32_BYTES
        self._compute_bytes = compute_bytes
        self._recompute = recompute
        self._has_adapters = adapters is not None
        self._rank = adapters.rank if adapters is not None else 0
        self._adapted_layers = adapters.layers if adapters is not None else frozenset[str]()
        self._shapes = tensor_shapes(sizes, output)
        by_layer: defaultdict[int | None, _Counts] = defaultdict(Counter)
        for name, shape in self._shapes.items():
            by_layer[_layer_of(name)][_kind_of(name, shape)] += 1
        self._ends = by_layer.pop(None)
        self._layers = {layer in sizes.sparse_layers: by_layer[layer] for layer in sizes.layer_kinds}
        self._num_parameters = sum(_numbers(counts) for counts in (self._ends, *by_layer.values()))

    def on_gpu(self, name: str, dims: ParallelDims, calls: list[CallSizes]) -> ModelOnGpu:
        """What each of the model's GPUs has to hold; the calls with the tokens of one data-parallel rank."""
        working = {call.name: self._working(call, dims) for call in calls}
        return ModelOnGpu(name=name, held=self._held(dims), working=working)

    def _held(self, dims: ParallelDims) -> Parts:
        stage = self._stage(dims)
        parts: dict[Part, int] = {"parameters": self._compute_bytes * stage.total}
        if self._has_adapters:
            trained = self._most_adapters(dims) + math.prod(self._shapes.get(_SCORE, (0,)))
            parts["parameters"] += FLOAT32_BYTES * trained
            parts["gradients"] = FLOAT32_BYTES * trained
            parts["optimizer"] = 2 * FLOAT32_BYTES * -(-trained // (dims.dp * dims.cp))
        elif self._is_trained:
            master = FLOAT32_BYTES if self._compute_bytes < FLOAT32_BYTES else 0
            sharing = dims.dp * dims.cp
            share = -(-stage.shared // sharing) + -(-stage.experts // (sharing // dims.ep))
            parts["gradients"] = FLOAT32_BYTES * stage.total
            parts["optimizer"] = (2 * FLOAT32_BYTES + master) * share
        elif self._has_averages:
            parts["parameters"] += FLOAT32_BYTES * stage.total
        return parts

    def _stage(self, dims: ParallelDims) -> "_Stage":
        """The parameters of the stage with most; where experts are in some layers only, stages differ."""
        return max((self._parameters_of(stage, dims) for stage in range(dims.pp)), key=lambda stage: stage.total)

    def _parameters_of(self, stage: int, dims: ParallelDims) -> "_Stage":
        sizes = self.sizes
        layers = stage_layers(sizes.num_layers, dims.pp)[stage]
        own: Counter[_Place] = Counter()
        for is_sparse, times in Counter(layer in sizes.sparse_layers for layer in layers).items():
            for place, numbers in _own_numbers(self._layers[is_sparse], dims).items():
                own[place] += times * numbers
        ends = _own_numbers(self._ends, dims)
        if dims.pp == 1:
            shared = ends["embedding"] + ends["output"] + ends["last norm"]
        else:
            shared = ends["embedding"] if stage == 0 else 0
            if stage == dims.pp - 1:  # a tied output is a copy of the embedding there
                shared += (ends["output"] or ends["embedding"]) + ends["last norm"]
        return _Stage(shared=own["layer"] + shared, experts=-(-own["expert"] // dims.ep))

    def _most_adapters(self, dims: ParallelDims) -> int:
        """Numbers of the adapters of the stage with most."""
        stages = stage_layers(self.sizes.num_layers, dims.pp)
        adapted = list(self._adapted(dims))
        own = [sum(rows + columns for layer, rows, columns in adapted if layer in layers) for layers in stages]
        return self._rank * max(own)

    def _adapted(self, dims: ParallelDims) -> Iterator[tuple[int, int, int]]:
        """Of each adapter: its layer, and how long B and A are on one rank."""
        for name in self._adapted_layers:
            rows, columns = self._shapes[f"{name}.weight"]
            if name.endswith(_BY_COLUMNS):
                columns = share_of(columns, dims.tp)
            else:
                rows = share_of(rows, dims.tp)
            yield int(name.split(".")[2]), rows, columns

    def _working(self, call: CallSizes, dims: ParallelDims) -> Parts:
        if call.kind == "generate":
            sizes = self.sizes
            return {
                "KV cache": key_value_bytes_per_token(sizes, number_bytes=self._compute_bytes) * call.tokens,
                "head": 2 * FLOAT32_BYTES * sizes.vocab_size * call.sequences,
                "buffers": self._compute_bytes * self._num_parameters,
            }
        is_training = call.kind == "train"
        tokens = -(-call.tokens // dims.cp)
        return {
            "activations": tokens * self._layers_bytes_per_token(dims, is_training=is_training),
            "head": self._head(tokens, dims, is_training=is_training),
        }

    def _layers_bytes_per_token(self, dims: ParallelDims, *, is_training: bool) -> int:
        sizes, recompute, compute_bytes = self.sizes, self._recompute, self._compute_bytes
        trains_weights = not self._has_adapters
        works_in = max(
            layer_bytes_per_token(sizes, layer, compute_bytes=compute_bytes, dims=dims, trains_weights=trains_weights)
            for layer in sizes.layer_kinds
        )
        if not is_training:
            return works_in
        kept = max(
            kept_bytes_per_token(
                sizes,
                layer,
                recompute=recompute,
                compute_bytes=compute_bytes,
                dims=dims,
                trains_weights=trains_weights,
            )
            for layer in sizes.layer_kinds
        )
        of_adapters = sum(
            adapter_bytes_per_token(rows, rank=self._rank, recompute=recompute, compute_bytes=compute_bytes)
            for _, rows, _ in self._adapted(dims)
        )
        stages = stage_layers(sizes.num_layers, dims.pp)
        under_way = max(len(layers) * (dims.pp - stage) for stage, layers in enumerate(stages))
        return kept * under_way + of_adapters + works_in

    def _head(self, tokens: int, dims: ParallelDims, *, is_training: bool) -> int:
        return head_bytes(
            self.sizes,
            self._output,
            tokens=tokens,
            compute_bytes=self._compute_bytes,
            has_gradient=is_training,
            tensor_parallel=dims.tp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """How many numbers one rank of a stage has."""

    shared: int
    """Of parameters that all d x c ranks have alike."""
    experts: int
    """Of those that belong to experts: d x c / e ranks have the same ones."""

    @property
    def total(self) -> int:
        return self.shared + self.experts


def _numbers(counts: _Counts) -> int:
    return sum(count * numbers for (_, numbers, _), count in counts.items())


def _own_numbers(counts: _Counts, dims: ParallelDims) -> "Counter[_Place]":
    """What one rank of t has of them."""
    own: Counter[_Place] = Counter()
    for (place, numbers, is_cut), count in counts.items():
        own[place] += count * (share_of(numbers, dims.tp) if is_cut else numbers)
    return own


def _layer_of(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith(_LAYERS) else None


def _kind_of(name: str, shape: Shape) -> tuple[_Place, int, bool]:
    """Where a parameter is, how many numbers it has, and whether ranks of t have parts of it."""
    is_cut = len(shape) >= _MATRIX and name != _SCORE and not name.endswith((_ROUTER, _SHARED_GATE))
    return _place_of(name), math.prod(shape), is_cut


def _place_of(name: str) -> _Place:
    if _EXPERTS in name:
        return "expert"
    if name.startswith(_LAYERS):
        return "layer"
    if name == _EMBEDDING:
        return "embedding"
    return "output" if name in (_OUTPUT, _SCORE) else "last norm"
