"""Experts of a transformers mixture, computed in the type of the other products, all of a layer in one call.

    hidden [T, H] ──► k rows of each token, sorted by expert ──► gate and up: one call ──► act(gate) * up
    [T, H] ◄── added up ◄── times how much each counts, in the tokens' order ◄── down: one call ◄──┘

transformers' own `grouped_mm` computes in the type of the weights, which are float32 master weights here: autocast does
not reach it, and on a GPU torch multiplies float32 groups one by one, with a wait of the host for each layer.

They stay in the files of the model until each rank reads what it keeps of them.

    files     a matrix for each expert ──────────────────────────────────────────────┐ the parts of them that are in
    module    all of a layer in one parameter, on `meta` ──► cut over ranks ──► own part, filled: `StoredExperts.fill`

transformers stacks the matrices when it loads them: nine of ten numbers of a mixture would lie in the memory of every
rank, before any rank has dropped what others keep.
"""

import math
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from corral.workers.backends.files.tensors import common, stored_slices
from corral.workers.backends.grouped_product import grouped_product
from corral.workers.backends.low_precision import products_type
from corral.workers.backends.sharding import local, start_of

GROUPED_EXPERTS: Final = "corral_grouped"
"""What `experts_implementation` names them by."""


def register_grouped_experts() -> None:
    """Make them known to transformers; again changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(GROUPED_EXPERTS, _compute)


def _compute(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' interface: hidden [T, H], experts [T, k], how much each counts [T, k] -> [T, H]."""
    if not module.has_gate or module.has_bias or module.is_transposed or module.has_post_expert_norm:
        output: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return output
    dtype = products_type(module.gate_up_proj)
    chosen, order = torch.sort(top_k_index.flatten(), stable=True)
    # On the device, where `chosen` is: the host need not wait for how many tokens an expert has.
    ends = torch.searchsorted(chosen, torch.arange(module.num_experts, device=chosen.device), right=True).int()
    # Nothing that has k rows for each token is held for longer than it is read; they are rounded before there are k of
    # them where no gradients of theirs are to be added up.
    rows = hidden_states if torch.is_grad_enabled() else hidden_states.to(dtype)
    gated = module._apply_gate(
        grouped_product(rows[order // top_k_index.shape[1]], ends, [module.gate_up_proj], dtype=dtype)
    )
    outputs = grouped_product(gated, ends, [module.down_proj], dtype=dtype)
    del gated
    outputs = outputs * top_k_weights.flatten()[order, None]
    outputs = outputs[torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))]
    return outputs.view(*top_k_index.shape, -1).sum(dim=1, dtype=hidden_states.dtype)


def expert_matrices(layers: Iterable[nn.Module]) -> dict[nn.Parameter, int]:
    """The parameters of experts in these layers, and how many matrices of each expert one of them has.

    gate_up_proj [E, 2 I, H] has two, for what reads matrices one by one; a bias [E, I] has none.
    """
    found: dict[nn.Parameter, int] = {}
    for module in (module for layer in layers for module in layer.modules() if hasattr(module, "is_concatenated")):
        for name, parameter in module.named_parameters(recurse=False):
            are_two = name == "gate_up_proj" and module.is_concatenated and not module.is_transposed
            found[parameter] = 0 if parameter.ndim < 3 else 2 if are_two else 1
    return found


_OF_EXPERT: Final = re.compile(r"\.experts\.\d+\.")


class _Piece(NamedTuple):
    """A stored tensor as a box of a parameter."""

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    dims: tuple[int, ...]
    """Which dimensions of the parameter are those of the stored tensor; it has one number of the others."""


class StoredExperts:
    """The files of a model, of which the experts are read part by part."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        """
        Args:
            stack: closes the files.
        """
        self._slices = stored_slices(directory, stack)
        self._pieces: dict[str, list[_Piece]] = {}

    def state_dict(self) -> dict[str, Any] | None:
        """What transformers loads in place of the files: all but the experts; None if there are no experts to leave."""
        if not any(map(_OF_EXPERT.search, self._slices)):
            return None
        return {name: _Unread(slice_) if _OF_EXPERT.search(name) else slice_ for name, slice_ in self._slices.items()}

    def find_pieces(self, model: Any) -> bool:
        """Learn of which stored tensors the parameters on `meta` are made; whether each is made of parts of them.

        Args:
            model: loaded from `state_dict`, and not cut yet.
        """
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                whole = torch.empty(parameter.shape, device="meta")
                with _NoCopies():
                    views = revert_weight_conversion(model, {name: whole})
                pieces = [self._piece(stored, view, whole) for stored, view in views.items()]
                self._pieces[name] = [piece for piece in pieces if piece is not None]
                if sum(math.prod(piece.size) for piece in self._pieces[name]) != parameter.numel():
                    return False
        return True

    def _piece(self, name: str, view: Tensor, whole: Tensor) -> _Piece | None:
        """Where a view of a whole parameter is in it, unless it is no box of it, or not stored so."""
        if name not in self._slices or list(self._slices[name].get_shape()) != list(view.shape):
            return None
        if view is not whole and view._base is not whole:
            return None
        strides = whole.stride()
        dims: list[int] = []
        for stride in view.stride():
            dim = next((dim for dim in range(dims[-1] + 1 if dims else 0, whole.ndim) if strides[dim] == stride), None)
            if dim is None:
                return None
            dims.append(dim)
        start = [view.storage_offset() // stride % size for stride, size in zip(strides, whole.shape, strict=True)]
        sizes = dict(zip(dims, view.shape, strict=True))
        return _Piece(name, tuple(start), tuple(sizes.get(dim, 1) for dim in range(whole.ndim)), tuple(dims))

    def fill(self, name: str, parameter: Tensor) -> None:
        """Read this rank's part of a parameter that was on `meta`; of the files no other numbers are read."""
        own, first = local(parameter), start_of(parameter)
        for piece in self._pieces[name]:
            if (found := common((piece.start, piece.size), (first, tuple(own.shape)))) is not None:
                source, target = found
                values: Tensor = self._slices[piece.name][tuple(source[dim] for dim in piece.dims)]
                part = own[target]
                part.copy_(values.view(part.shape))

    def only_type(self) -> str | None:
        """The type that all weights of the files are of, in safetensors' words; None if there are several."""
        types = {stored.get_dtype() for stored in self._slices.values()}
        return types.pop() if len(types) == 1 else None


class _NoCopies(TorchFunctionMode):
    """What would be a copy is a view, of which can be asked where it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


class _Unread:
    """A stored tensor as transformers asks for it, which gives its shape and none of its numbers."""

    def __init__(self, stored: Any) -> None:
        self._shape = stored.get_shape()

    def __getitem__(self, _: Any) -> "_Unread":
        return self

    def to(self, *, device: Any, dtype: torch.dtype) -> Tensor:
        """On `meta`, whatever device is named."""
        return torch.empty(self._shape, dtype=dtype, device="meta")
