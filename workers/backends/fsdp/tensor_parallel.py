"""Every layer of a model cut over ranks that work on the same tokens: tensor parallelism.

    x [T, H] ──┬─► q, k, v: rows of own heads ─► attention ─► o: columns of own heads ─► partial sums ─ all-reduce ─►
    (on every  └─► gate, up: own rows ──────────────────────► down: own columns ───────► partial sums ─ all-reduce ─►
     rank)
    tokens ──► embedding: rows of own tokens, else 0 ─ all-reduce ─► x ... ──► output: rows of own tokens (`shard`)

Between the halves of a layer every rank has all of x, so norms and what follows are computed alike on all ranks, and
their weights are copies that stay equal bit for bit. The gradient that comes back into x is summed over the ranks once
per half. Weights that are cut are DTensors, by which export, checkpoints and FSDP2 know of which tensor they are a
part; products are made of plain tensors.

    own rows + B [own rows, r] A [r, in]        own columns + B [out, r] A [r, own columns]

An adapter has the half cut that is as long as what its layer is cut by. The other one is a copy that makes a part of
what is summed, and its gradient is summed once a step.

Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from corral.experiments.inputs.decoder_config import TENSOR_PARALLEL_MODELS
from corral.workers.backends.chunked_head import ChunkedHead, VocabularyShard
from corral.workers.backends.context_parallel import with_transpose
from corral.workers.backends.lora import AdaptedLinear, drop_columns, is_adapter
from corral.workers.backends.low_precision import CastingLinear, product
from corral.workers.backends.sharding import cut, is_cut_by_tensor, layers_of, local, local_with_gradient

_BY_ROWS: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_BY_COLUMNS: Final = ("self_attn.o_proj", "mlp.down_proj")
_BEGINS_WITH_ALL: Final = ("self_attn", "mlp")
_SEES_OWN_HEADS: Final = (".self_attn.q_norm.weight", ".self_attn.k_norm.weight")


def cut_layers(model: Any, mesh: DeviceMesh) -> None:
    """Leave each rank its part of every layer of a whole model; before FSDP2 cuts what is left of them by rows.

    Args:
        model: of a kind, and with heads and an inner size, that the ranks can share (experiments/checks/training.py).
        mesh: of one dimension, the tensor-parallel ranks.
    """
    assert model.config.model_type in TENSOR_PARALLEL_MODELS, "layers of other kinds are refused at submission"
    for layer in layers_of(model):
        for name in _BY_ROWS:
            _cut_rows(layer.get_submodule(name), mesh)
        for name in _BY_COLUMNS:
            _cut_columns(layer.get_submodule(name), mesh)
        for name in _BEGINS_WITH_ALL:
            layer.get_submodule(name).register_forward_pre_hook(partial(_sum_gradient, mesh), with_kwargs=True)
    if model.config.vocab_size % mesh.size() == 0:  # others are copied whole
        _cut_vocabulary(model, mesh)


def _cut_rows(module: Any, mesh: DeviceMesh) -> None:
    _cut(module, mesh, weight=0, bias=0)
    if isinstance(module, AdaptedLinear):
        _cut(module.lora_B, mesh, weight=0)


def _cut_columns(module: Any, mesh: DeviceMesh) -> None:
    _cut(module, mesh, weight=1)
    is_adapted = isinstance(module, AdaptedLinear)
    module.__class__ = AdaptedColumns if is_adapted else OwnColumns
    module.tensor_mesh = mesh
    if is_adapted:
        _cut(module.lora_A, mesh, weight=1)


def _cut_vocabulary(model: Any, mesh: DeviceMesh) -> None:
    """Rows of the embedding, and of a language model's output; one that is tied stays one parameter."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = output is not None and output.weight is embedding.weight
    _cut(embedding, mesh, weight=0)
    embedding.__class__, embedding.tensor_mesh = OwnTokens, mesh
    if not isinstance(output, ChunkedHead):
        return
    if is_tied:
        output.weight = embedding.weight
    else:
        _cut(output, mesh, weight=0, bias=0)
    output.register_forward_pre_hook(partial(_sum_gradient, mesh), with_kwargs=True)
    output.shard = VocabularyShard(mesh.get_group(), first=mesh.get_local_rank() * local(output.weight).shape[0])


def _cut(module: Any, mesh: DeviceMesh, *, weight: int, bias: int | None = None) -> None:
    """Leave a module this rank's part of its parameters, which are cut along a dimension each."""
    module.weight = _part(module.weight, mesh, weight)
    if bias is not None and module.bias is not None:
        module.bias = _part(module.bias, mesh, bias)


def _part(parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    return nn.Parameter(cut(parameter.detach(), mesh, [Shard(dim)]), requires_grad=parameter.requires_grad)


class OwnColumns(CastingLinear):
    """A linear layer that has some of its inputs on each rank: [..., in / t] -> [..., out], summed over the ranks."""

    tensor_mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:
        output = _summed(self.partial(input), self.tensor_mesh)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def partial(self, input: Tensor) -> Tensor:
        """What this rank's columns make of their inputs."""
        return product(input, local_with_gradient(self.weight), None)


class AdaptedColumns(OwnColumns, AdaptedLinear):
    """Some columns of a linear layer with an adapter, whose A has the same columns."""

    def partial(self, input: Tensor) -> Tensor:
        return super().partial(input) + self.adapted(input)

    def seen(self, input: Tensor, dropout: float) -> Tensor:
        return drop_columns(input, dropout, num_columns=self.in_features, rank=self.tensor_mesh.get_local_rank())


class OwnTokens(nn.Embedding):
    """An embedding that has the rows of some tokens on each rank; the others' rows come by a sum with zeros."""

    tensor_mesh: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:
        """[...] -> [..., H]."""
        weight = local_with_gradient(self.weight)
        rows = weight.shape[0]
        first = self.tensor_mesh.get_local_rank() * rows
        is_own = (input >= first) & (input < first + rows)
        embedded = F.embedding(torch.where(is_own, input - first, 0), weight)  # no padding: see load_model
        return _summed(embedded * is_own[..., None], self.tensor_mesh)


def _sum_gradient(
    mesh: DeviceMesh, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a half of a layer, or the output: hands its input on, and adds up the gradient that comes back."""

    def handed_on(input: Tensor) -> Tensor:
        return with_transpose(input, lambda whole: whole.view_as(whole), partial(_all_reduced, mesh.get_group()))

    if args:
        return (handed_on(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": handed_on(kwargs["hidden_states"])}


def _summed(partial_sum: Tensor, mesh: DeviceMesh) -> Tensor:
    """Parts -> their sum on every rank; its gradient, the same on all ranks, is that of each part."""
    return with_transpose(partial_sum, partial(_all_reduced, mesh.get_group()), lambda gradient: gradient)


def _all_reduced(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def sum_gradients_of_own_parts(parameters: Iterable[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> None:
    """Make whole the gradients of weights that are copied, and that each rank has used for its own part only.

    Once a step, in one collective, after the last backward pass: norms of queries and keys, and of each adapter the
    half that is not cut.
    """
    parts = [
        local(parameter.grad)
        for name, parameter in parameters
        if parameter.grad is not None
        and (name.endswith(_SEES_OWN_HEADS) or (is_adapter(name) and not is_cut_by_tensor(parameter)))
    ]
    if not parts:
        return
    packed = torch.cat([gradient.flatten() for gradient in parts])
    dist.all_reduce(packed, group=group)
    totals = torch.split(packed, [gradient.numel() for gradient in parts])
    for gradient, total in zip(parts, totals, strict=True):
        gradient.copy_(total.view_as(gradient))


def squared_norm(parameters: Iterable[nn.Parameter], *, tensor_ranks: int, device: torch.device) -> Tensor:
    """This rank's part of the squared norm of all gradients; copies on tensor-parallel ranks count once in all.

    A float64 scalar on the device, which nobody has waited for.
    """
    cut: list[Tensor] = []
    copied: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            is_copied = tensor_ranks > 1 and not is_cut_by_tensor(parameter)
            (copied if is_copied else cut).append(local(parameter.grad))
    return _squared(cut, device) + _squared(copied, device) / tensor_ranks


def _squared(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.nn.utils.get_total_norm(gradients).double().square()
