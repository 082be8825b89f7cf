"""One role's model in one layout -> bytes on each of its GPUs, as the megatron backend holds it.

    parameters   in the type of the products: the layers of a stage, cut over t,    model.py
                 and the embedding in the first one, the output in the last
    gradients    float32 of all of that, always there                               optimizer.py: with_gradients
    optimizer    AdamW: two moments of a share of it, one for each of d ranks, and  Megatron's distributed optimizer
                 float32 weights beside, where products are of another type
    activations  what autograd keeps of the stage's layers, for as many             pipeline.py: 1F1B
                 micro-batches as are under way in the first stage, and one
                 layer's worth to work in; without gradients that alone
    buffers      where a call generates: all weights whole                          engine.py: MegatronEngine.model

The files are those of workers/backends/megatron.
Each figure is that of the stage with most: the first or the last.
"""

import math

from corral.scheduling.memory.activations import FLOAT32_BYTES, head_bytes, layer_bytes_per_token, share_of
from corral.scheduling.memory.decoder_sizes import DecoderSizes, Output, tensor_shapes
from corral.scheduling.memory.fsdp import CallSizes
from corral.scheduling.memory.gpu import ModelOnGpu, Part, Parts
from corral.scheduling.parallel import ParallelDims

_MATRIX = 2  # dimensions; norms and biases, which have one, count as whole on every rank
_EMBEDDING, _OUTPUTS = "model.embed_tokens.weight", ("lm_head.weight", "score.weight")


class MegatronModel:
    """The model of a role, whatever its layout."""

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        output: Output = "vocabulary",
        is_trained: bool,
        compute_bytes: int = FLOAT32_BYTES,
    ) -> None:
        """
        Args:
            compute_bytes: of a number in matrix products: 4 or 2.
        """
        self.sizes = sizes
        self._output = output
        self._is_trained = is_trained
        self._compute_bytes = compute_bytes
        self._shapes = tensor_shapes(sizes, output)

    def on_gpu(self, name: str, dims: ParallelDims, calls: list[CallSizes]) -> ModelOnGpu:
        """What each of the model's GPUs has to hold; the calls with the tokens of one data-parallel rank."""
        working = {call.name: self._working(call, dims) for call in calls}
        return ModelOnGpu(name=name, held=self._held(dims), working=working)

    def _held(self, dims: ParallelDims) -> Parts:
        numbers = self._numbers(dims)
        parts: dict[Part, int] = {"parameters": self._compute_bytes * numbers}
        if self._is_trained:
            master = FLOAT32_BYTES if self._compute_bytes < FLOAT32_BYTES else 0
            parts["gradients"] = FLOAT32_BYTES * numbers
            parts["optimizer"] = (2 * FLOAT32_BYTES + master) * -(-numbers // dims.dp)
        return parts

    def _numbers(self, dims: ParallelDims) -> int:
        """Of the parameters of the stage with most."""
        layers = embedding = output = others = 0
        for name, shape in self._shapes.items():
            is_cut = len(shape) == _MATRIX and not name.startswith("score.")
            own = share_of(math.prod(shape), dims.tp) if is_cut else math.prod(shape)
            if name.startswith("model.layers."):
                layers += own
            elif name == _EMBEDDING:
                embedding = own
            elif name in _OUTPUTS:
                output = own
            else:
                others += own
        of_stage = -(-layers // dims.pp)
        if dims.pp == 1:
            return of_stage + embedding + output + others
        last = output or embedding  # a tied output is a copy of the embedding, in the last stage
        return of_stage + max(embedding, last + others)

    def _working(self, call: CallSizes, dims: ParallelDims) -> Parts:
        if call.kind == "generate":
            return {"buffers": self._compute_bytes * sum(math.prod(shape) for shape in self._shapes.values())}
        is_training = call.kind == "train"
        of_layer = layer_bytes_per_token(self.sizes, 0, compute_bytes=self._compute_bytes, tensor_parallel=dims.tp)
        kept = of_layer * -(-self.sizes.num_layers // dims.pp) * dims.pp if is_training else 0
        head = FLOAT32_BYTES * self.sizes.hidden_size * call.tokens
        if self._output == "vocabulary":
            head = head_bytes(
                self.sizes,
                tokens=call.tokens,
                compute_bytes=self._compute_bytes,
                has_gradient=is_training,
                tensor_parallel=dims.tp,
            )
        return {"activations": call.tokens * (kept + of_layer), "head": head}
