"""A module cut over ranks by FSDP2, and its parameters made whole and cut again.

    whole module ── shard ──► each rank holds rows of every parameter
    rows ── whole ──► whole tensors, one at a time ── take_over ──► rows of another module's parameters

This rank's part of a tensor is `local`, all of it is `whole`. Every function of a cut tensor is a collective of its
mesh unless it says otherwise; of a tensor that is not cut it is plain arithmetic, so that one rank runs the same code.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from corral.scheduling.memory.model import cut_dim
from corral.workers.backends.parallel_context import ParallelContext

TENSOR: Final = "tensor"
_SHARD: Final = "shard"
"""Dimensions of a mesh: the ranks that have other parts of a layer, and those that have other rows of such a part."""


def device_mesh(context: ParallelContext) -> DeviceMesh:
    """The mesh of a layout as torch knows it, of those dimensions that have more than one rank; no collective."""
    groups = {_SHARD: context.shard_group, TENSOR: context.tp_group}
    formed = {name: group for name, group in groups.items() if group is not None}
    sizes = [group.size() for group in formed.values()]
    assert math.prod(sizes) == len(context.mesh.ranks), f"{context.mesh.dims} has stages, or its ranks have no groups"
    ranks = torch.tensor(context.mesh.ranks).view(sizes)
    return DeviceMesh.from_group(list(formed.values()), context.device.type, mesh=ranks, mesh_dim_names=tuple(formed))


def shard(model: Any, mesh: DeviceMesh, *, compute_dtype: torch.dtype = torch.float32) -> None:
    """Cut every layer over the data-parallel and context-parallel ranks, all in one.

    Layers, and an output of their own, are gathered in the type of the products, which is all that products read of
    them; the embedding and the last norm, which are added to what is float32, in float32. Gradients are added up in
    float32, whichever type they are made in.

    Gradients are added up, not averaged: losses carry the global mean, and each context-parallel rank has the part of
    the gradient that its tokens make. A mesh of tensor-parallel ranks alone leaves the model as it is.
    """
    if _SHARD not in (mesh.mesh_dim_names or ()):
        return
    ranks = mesh[_SHARD].size()
    low = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    output = model.get_output_embeddings()
    has_own = output is not None and output.weight is not model.get_input_embeddings().weight
    for module in [*layers_of(model), *([output] if has_own else []), model]:
        is_low = module is not model and compute_dtype != torch.float32
        fully_shard(
            module,
            mesh=mesh[_SHARD],
            reshard_after_forward=module not in (output, model),  # whose backward pass follows at once
            shard_placement_fn=lambda tensor: Shard(cut_dim(tensor.shape, ranks)),
            mp_policy=low if is_low else MixedPrecisionPolicy(cast_forward_inputs=False),
        )
    for module in _cut_modules(model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        module.set_gradient_divide_factor(1.0)


def layers_of(model: Any) -> list[nn.Module]:
    """The layers of a transformers model, cut or not, without its embeddings, its last norm and its output."""
    names = {name for layer in model._no_split_modules or () for name in (layer, f"FSDP{layer}")}  # FSDP2 renames
    return [module for module in model.modules() if type(module).__name__ in names]


def reshard(model: nn.Module) -> None:
    """Free what a forward pass left whole, so that the module's parameters are this rank's rows again; no collective.

    FSDP2 keeps the ends of the model whole after a forward pass, for the backward pass that follows in training.
    Without one its parameters would be whole copies, and what is written to them would be lost.
    """
    for module in _cut_modules(model):
        module.reshard()


def sum_gradients(model: nn.Module, is_due: bool) -> None:
    """Whether the next backward pass ends with the sum over the ranks, after which each keeps its rows; no collective.

    Without it, whole gradients stay on every rank, and the next passes add to them.
    """
    for module in _cut_modules(model):
        module.set_requires_gradient_sync(is_due, recurse=False)


def is_cut_by_tensor(tensor: Tensor) -> bool:
    """Whether tensor-parallel ranks have a part of it each, and not a copy."""
    return isinstance(tensor, DTensor) and TENSOR in (tensor.device_mesh.mesh_dim_names or ())


def local_with_gradient(tensor: Tensor) -> Tensor:
    """A tensor-parallel rank's part of a tensor, or the tensor itself, with gradient; no collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor that is cut, or the tensor itself; without gradient, no collective."""
    return local_with_gradient(tensor.detach())


def start_of(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part of a tensor begins in it, by dimension; no collective."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole: cut as `like` is, on its device; no collective."""
    assert whole.shape == like.shape, f"{tuple(whole.shape)} for {tuple(like.shape)}"
    whole = whole.to(like.device)
    return cut(whole, like.device_mesh, like.placements) if isinstance(like, DTensor) else whole


def cut(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Tensor:
    """This rank's part of a tensor that every rank has whole, by the placements of a DTensor; no collective."""
    # src_data_rank=None: every rank has the whole tensor itself, nothing needs to be sent. The rows are a view of it,
    # which would keep all of it in memory.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).clone()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is cut, made whole on every rank; one that is not is given as it is. Without gradient."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def take_over(parameters: Mapping[str, nn.Parameter], weights: Iterable[tuple[str, Tensor]], *, eta: float) -> None:
    """Move every parameter towards the whole tensor of its name: own = eta * given + (1 - eta) * own; no collective.

    Args:
        weights: each parameter once, in any order, type and place.
        eta: 1 copies bit for bit; less keeps an exponential moving average.

    Raises:
        ValueError: if `eta` is outside [0, 1], or the weights are not exactly those of the parameters. Those that came
            before the first wrong one are taken over by then.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for name, weight in each_once(shapes, weights, eta=eta):
        given, own = local(cut_like(weight, parameters[name])), local(parameters[name])
        if eta == 1.0:
            own.copy_(given)
        else:
            own.lerp_(given.to(own.dtype), eta)


def each_once(
    shapes: Mapping[str, tuple[int, ...]], weights: Iterable[tuple[str, Tensor]], *, eta: float
) -> Iterator[tuple[str, Tensor]]:
    """Weights that are taken over, without gradient.

    Raises:
        ValueError: if `eta` is outside [0, 1], or the weights are not exactly those of these names and shapes.
    """
    if not 0.0 <= eta <= 1.0:
        raise ValueError(f"eta must be in [0, 1], got {eta}: own = eta * given + (1 - eta) * own")
    missing = dict(shapes)
    for name, weight in weights:
        if name not in missing:
            problem = "was given twice" if name in shapes else "is no parameter of this model"
            raise ValueError(f"weight {name!r} {problem}; its parameters are {_first(shapes)}")
        if tuple(weight.shape) != shapes[name]:
            raise ValueError(f"weight {name!r} has shape {tuple(weight.shape)}, the model's has {shapes[name]}")
        del missing[name]
        yield name, weight.detach()
    if missing:
        raise ValueError(f"{len(missing)} of {len(shapes)} weights were not given: {_first(missing)}")


def _cut_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _first(names: Iterable[str]) -> str:
    """a, b, c, ..."""
    shown = sorted(names)
    return ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
