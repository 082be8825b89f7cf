"""Low-rank adapters beside Megatron's linear layers: one for each matrix of the model that such a layer is made of.

    x ─┬─► W0 x of linear_qkv: q0 q1 k0 v0 | q2 q3 k1 v1 ─────────────────────────► + ──►     rows of groups of heads
       ├─► q_proj: A [r, in] ─► B [own rows of q, r] ─┐
       ├─► k_proj: A ─► B ────────────────────────────┼─► group by group ─► alpha / r
       └─► v_proj: A ─► B ────────────────────────────┘

    column-parallel (linear_qkv, linear_fc1)    B is cut as the rows are; A is whole on each rank of t, and makes a part
    row-parallel (linear_proj, linear_fc2)      A is cut as the columns are; B is whole, and adds to a part of the sum

What is whole has a part of its gradient on each rank, which are summed once a step, as those of norms are. So the model
that is trained is the one that the fsdp backend trains, and what is exported are peft's names and shapes. W0 is frozen:
Megatron keeps gradients and moments of adapters alone, both float32, and so are A and B. What is said of adapters in
backends/lora.py holds here, too.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from corral.experiments.config.model import LoraConfig
from corral.workers.backends.lora import draw_A, drop_columns, read_adapter
from corral.workers.backends.megatron.bridge import Bridge
from corral.workers.backends.megatron.weights import StageWeights
from corral.workers.checkpoint.low_rank import LowRank

_QKV: Final = "self_attention.linear_qkv"
_LAYERS: Final = (_QKV, "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_A: Final = ".lora_A.weight"
_B: Final = ".lora_B.weight"


class Adapter(nn.Module):
    """What is beside one matrix of the model, as far as this rank has it."""

    def __init__(self, num_inputs: int, num_outputs: int, rank: int, *, device: torch.device) -> None:
        """
        Args:
            num_inputs: columns of the matrix that this rank has.
            num_outputs: its rows that this rank has.
        """
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(rank, num_inputs, device=device))
        self.lora_B = nn.Parameter(torch.zeros(num_outputs, rank, device=device))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], not scaled, in the type of the input."""
        return F.linear(F.linear(input, self.lora_A.to(input.dtype)), self.lora_B.to(input.dtype))


class _Adapted:
    """What both kinds of Megatron's linear layers do with adapters."""

    adapters: nn.ModuleDict
    """By the last part of the name of the matrix that each is beside."""
    parts: list[tuple[str, int]]
    """Such a name and the own rows of each matrix of the layer, in its order."""
    num_groups: int
    """Groups of heads on this rank, in each of which the matrices take turns; 1 where they follow each other."""
    scale: float
    dropout: float
    training: bool

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        sequence_parallel: bool,
        tp_group: Any,
        **_: Any,
    ) -> Tensor:
        """Megatron's seam for the product itself; between it and this rank's columns nothing else is summed."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        return F.linear(input, weight, bias) + self._adapted(input)

    def _adapted(self, input: Tensor) -> Tensor:
        """[T, 1, own columns] -> [T, 1, own rows]."""
        outputs = [
            self.adapters[name](self._seen(input))
            if name in self.adapters
            else input.new_zeros(*input.shape[:-1], num_rows)
            for name, num_rows in self.parts
        ]
        if len(outputs) == 1:
            return outputs[0] * self.scale
        by_group = [output.unflatten(-1, (self.num_groups, -1)) for output in outputs]
        return torch.cat(by_group, -1).flatten(-2) * self.scale

    def _seen(self, input: Tensor) -> Tensor:
        """What an adapter sees: each draws for itself."""
        return self._dropped(input) if self.dropout and self.training else input

    def _dropped(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.dropout)


class AdaptedColumns(_Adapted, ColumnParallelLinear):  # type: ignore[misc]
    """Some rows of matrices that all have the same input, which every rank of the layer has whole."""


class AdaptedRows(_Adapted, RowParallelLinear):  # type: ignore[misc]
    """Some columns of a matrix; the ranks' outputs are parts of a sum."""

    def _dropped(self, input: Tensor) -> Tensor:
        return drop_columns(input, self.dropout, num_columns=self.input_size, rank=self.tp_group.rank())


class Adapters:
    """All adapters of a model, of which this rank has those of its stage, and what is trained beside them."""

    def __init__(self, config: LoraConfig, stage: Any, base: StageWeights, bridge: Bridge) -> None:
        """Freeze a stage, and put adapters beside its linear layers; a score layer is trained whole.

        A collective of the model's ranks.

        Args:
            base: the parameters of the stage; as it is now it tells which tensors each of them is made of.
        """
        assert not bridge.num_experts, "adapters beside a mixture of experts are refused at submission"
        self._config = config
        shapes = base.stored_shapes()
        stage.requires_grad_(False)
        parameters: dict[str, nn.Parameter] = {}
        for layer in stage.decoder.layers:
            for path in _LAYERS:
                stored = bridge.stored_names(f"decoder.layers.{layer.layer_number - 1}.{path}.weight")
                matrices = {name.removesuffix(".weight"): shapes[name] for name in stored}
                if any(map(config.adapts, matrices)):
                    num_groups = layer.self_attention.num_query_groups_per_partition if path == _QKV else 1
                    parameters |= _adapt(layer.get_submodule(path), matrices, config, num_groups=num_groups)
        assert parameters, "a stage that would train nothing is refused at submission"
        for name, parameter in base.parameters.items():
            if bridge.is_score_layer(name):
                parameter.requires_grad_(True)
                parameters[name] = parameter
        self.trained = StageWeights(parameters, bridge, base.groups, base.device)
        """Adapters and score layer."""
        self._shapes = self.trained.stored_shapes()

    @property
    def layers(self) -> list[str]:
        """The linear layers of the whole model that have an adapter, by their names there."""
        return [name.removesuffix(_A) for name in self._shapes if name.endswith(_A)]

    def is_frozen(self, name: str) -> bool:
        """Whether a stored tensor of the model is one that training leaves as it is."""
        return name not in self._shapes

    @torch.no_grad()
    def initialize(self, bridge: Bridge, *, seed: int) -> None:
        """Values to start from: of an adapter that is given, or A at random and B zero.

        Guarantee: for one seed they are the fsdp backend's, whatever the layout.
        """
        if self._config.adapter is not None:
            given = {name: torch.zeros(shape) for name, shape in self._shapes.items()}
            read_adapter(self._config.adapter, given)
            self.trained.take_over(given.items())
            return
        for name, parameter in self.trained.parameters.items():
            if name.endswith(_A):
                whole = torch.empty(self._shapes[name])
                draw_A(whole, name.removesuffix(_A), seed=seed)
                parameter.copy_(bridge.own_part(name, whole, parameter))

    @torch.no_grad()
    def merged(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the base, adapted ones as the float32 sum with their adapter; all ranks read to the end."""
        layers = set(self.layers)
        for name, tensor in weights:
            layer = name.removesuffix(".weight")
            if layer not in layers:
                yield name, tensor
                continue
            A, B = (self.trained.whole(f"{layer}{half}") for half in (_A, _B))
            yield name, LowRank(A, B, self._config.scale).added_to(tensor)


def _adapt(
    module: Any, matrices: Mapping[str, tuple[int, ...]], config: LoraConfig, *, num_groups: int
) -> dict[str, nn.Parameter]:
    """Put adapters beside a linear layer.

    Args:
        matrices: what it is made of, by their names in the model: [out, in] of each.

    Returns:
        The adapters' parameters, by the names that files have.
    """
    is_column_parallel = type(module) is ColumnParallelLinear
    assert is_column_parallel or type(module) is RowParallelLinear, f"a {type(module).__name__} has no adapters"
    num_ranks, device = module.tp_group.size(), module.weight.device
    module.adapters = nn.ModuleDict()
    module.parts, module.num_groups = [], num_groups
    module.scale, module.dropout = config.scale, config.dropout
    parameters: dict[str, nn.Parameter] = {}
    for name, (num_rows, num_columns) in matrices.items():
        own_rows, own_columns = (
            (num_rows // num_ranks, num_columns) if is_column_parallel else (num_rows, num_columns // num_ranks)
        )
        kind = name.rpartition(".")[2]
        module.parts.append((kind, own_rows))
        if config.adapts(name):
            adapter = Adapter(own_columns, own_rows, config.rank, device=device)
            cut, whole = (adapter.lora_B, adapter.lora_A) if is_column_parallel else (adapter.lora_A, adapter.lora_B)
            set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=0 if is_column_parallel else 1, stride=1)
            # Megatron's word for what has a part of its gradient on each rank.
            whole.sequence_parallel = True  # type: ignore[attr-defined]
            module.adapters[kind] = adapter
            parameters |= {f"{name}{_A}": adapter.lora_A, f"{name}{_B}": adapter.lora_B}
    module.__class__ = AdaptedColumns if is_column_parallel else AdaptedRows
    return parameters
