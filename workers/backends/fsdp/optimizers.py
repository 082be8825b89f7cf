"""Gradients ──► updates: AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest.

    parameter                        adamw    muon      decays
    matrix of a layer, of an expert  AdamW    Muon      yes
    embedding, output, score layer   AdamW    AdamW     yes
    bias, weight of a norm           AdamW    AdamW     if `decays_biases_and_norms`

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by the nearest
orthogonal one: all its directions are learned equally fast, also those that the gradient hardly shows.

    momentum M = mu M + (1 - mu) G,   U = mu M + (1 - mu) G with Nesterov, else M
    W = W - lr * (0.2 * sqrt(max(rows, columns)) * orthogonalized(U) + weight_decay * W)

The factor makes an update as large as AdamW's usually are, so that both share a learning rate and its schedule (Liu et
al. 2025, https://arxiv.org/abs/2502.16982, section 2.2).

Matrices whose rows are cut over ranks are dealt out whole: each rank computes with some of them, and all have parts.

    rows of matrices 0, 1, ... of a round ──all-to-all──► rank i: matrix i, whole ──compute──► result i
    rows of the results 0, 1, ...         ◄──all-to-all── its rows ◄──────────────────────────────┘

As many matrices make a round as there are ranks, and the largest come first, so that those of a round take equally
long. Each rank makes one of them, where all ranks would make all of them alike.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from corral.experiments.config.model import OptimizerConfig
from corral.workers.backends.fsdp.experts import expert_matrices
from corral.workers.backends.sharding import cut_like, layers_of, local
from corral.workers.backends.train_state import ADAMW

_ADAMW_UPDATE = 0.2  # root mean square of AdamW's updates, in units of the learning rate, as Liu et al. measured it
_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's: steepest at 0, and between 0.7 and 1.2 after five steps
_MUON = frozenset({"momentum_buffer"})
MUON_MOMENTUM = 0.95  # decay of the average of gradients that is orthogonalized
NEWTON_SCHULZ_STEPS = 5
_TINY = 1e-7  # keeps a gradient of zeros at zero


def make_optimizer(model: nn.Module, config: OptimizerConfig, *, compute_dtype: torch.dtype) -> "AdamWAndMuon":
    """The optimizer of the parameters that are trained; its rate must be set before each step (mesh_engine.py).

    Args:
        model: cut over the ranks already, where it is.
        compute_dtype: of Muon's matrix products.
    """
    layers = layers_of(model)
    matrices = {p: int(p.ndim == 2) for layer in layers for p in layer.parameters()} | expert_matrices(layers)
    groups: dict[tuple[int, bool, bool], list[nn.Parameter]] = {}
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        num_matrices = matrices.get(parameter, 0) if config.type == "muon" else 0
        decays = parameter.ndim >= 2
        is_cut = isinstance(parameter, DTensor)  # torch steps either kind in one call, and not both
        groups.setdefault((num_matrices, decays, is_cut), []).append(parameter)
    return AdamWAndMuon(
        [
            {
                "params": parameters,
                "weight_decay": config.weight_decay if decays else 0.0,
                "num_matrices": num_matrices,  # to orthogonalize in each, or in each expert's part; 0: AdamW's
            }
            for (num_matrices, decays, _), parameters in groups.items()
        ],
        config,
        compute_dtype=compute_dtype,
    )


def kinds_kept(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter], frozenset[str]]:
    """What an optimizer of AdamW or Muon keeps of each parameter once it has made a step."""
    orthogonalized = {
        id(parameter) for group in optimizer.param_groups if group.get("num_matrices") for parameter in group["params"]
    }
    return lambda parameter: _MUON if id(parameter) in orthogonalized else ADAMW


class AdamWAndMuon(torch.optim.AdamW):
    """AdamW, except for the groups that are orthogonalized; without any of those it is AdamW.

    torch.optim.Muon is not used: its products are bfloat16 whatever the model's are, and over parameters that are cut
    each of them would be a collective, in an order of additions that depends on the number of ranks.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        config: OptimizerConfig,
        *,
        compute_dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self._compute_dtype = compute_dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; a collective where they are cut."""
        for group in self.param_groups:
            if group["num_matrices"]:
                self._orthogonal_step([p for p in group["params"] if p.grad is not None], group)
        return super().step()

    def _orthogonal_step(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for some in rounds_of(parameters):
            updates = [self._update(parameter) for parameter in some]
            if can_be_dealt(updates[0]):
                directions = compute_dealt(updates, self._direction)
            else:
                directions = [self._part(updates[0], group["num_matrices"])]
            for parameter, direction in zip(some, directions, strict=True):
                own = local(parameter)
                own.mul_(1.0 - group["lr"] * group["weight_decay"])
                own.add_(direction.to(own.dtype), alpha=-group["lr"])
                parameter.grad = None  # AdamW updates what still has one

    def _update(self, parameter: nn.Parameter) -> Any:
        """What is to be orthogonalized, in the type of the products; cut as the parameter is."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1.0 - MUON_MOMENTUM)
        update = gradient.lerp(momentum, MUON_MOMENTUM)  # Nesterov's: the newest gradient counts once more
        return update.detach().to(self._compute_dtype)

    def _part(self, update: Tensor, num_matrices: int) -> Tensor:
        """This rank's part of the direction of an update that is not dealt out: whole experts are its own affair."""
        are_own = update.ndim == 3 and isinstance(update, DTensor) and update.placements == (Shard(0),)
        whole = local(update) if are_own or not isinstance(update, DTensor) else update.full_tensor()
        matrices = whole
        if whole.ndim == 3:
            matrices = whole.reshape(-1, whole.shape[1] // num_matrices, whole.shape[2])
        direction = self._direction(matrices).reshape(whole.shape)
        return direction if are_own else local(cut_like(direction, update))

    def _direction(self, matrices: Tensor) -> Tensor:
        """[..., rows, columns] of updates -> what a step with a learning rate of -1 adds."""
        scale = _ADAMW_UPDATE * math.sqrt(max(matrices.shape[-2:]))
        return orthogonalized(matrices, steps=NEWTON_SCHULZ_STEPS) * scale


def orthogonalized(matrix: Tensor, *, steps: int) -> Tensor:
    """U V^T of the singular value decomposition U S V^T, nearly: the singular values end between about 0.7 and 1.2.

    Newton-Schulz: X = aX + (b XX^T + c (XX^T)^2) X, from X = matrix / |matrix|, maps each singular value by a quintic
    and leaves the vectors as they are.

    Args:
        matrix: [..., rows, columns], of any number of matrices; the products have its type.
    """
    a, b, c = _QUINTIC
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    result: Tensor = matrix.mT if is_tall else matrix  # the product with its transpose is as small as can be
    result = result / (torch.linalg.matrix_norm(result, keepdim=True) + _TINY)
    for _ in range(steps):
        gram = result @ result.mT
        result = a * result + (b * gram + c * gram @ gram) @ result
    return result.mT if is_tall else result


def can_be_dealt(tensor: Tensor) -> bool:
    """Whether its rows, and nothing else of it, are cut over ranks."""
    return tensor.ndim == 2 and isinstance(tensor, DTensor) and tensor.placements == (Shard(0),)


def rounds_of(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those that can be dealt out, as many at a time as there are ranks; then the others, one by one."""
    dealt: list[Any] = sorted((p for p in parameters if can_be_dealt(p)), key=lambda parameter: -parameter.numel())
    ranks = dealt[0].device_mesh.size() if dealt else 1
    for first in range(0, len(dealt), ranks):
        yield dealt[first : first + ranks]
    yield from ([parameter] for parameter in parameters if not can_be_dealt(parameter))


def compute_dealt(matrices: Sequence[DTensor], compute: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """This rank's rows of `compute(matrix)` for each of a round; a collective of the mesh that they are cut over.

    Args:
        matrices: [rows, columns] of one type; each `can_be_dealt`, and no more of them than ranks.
        compute: [rows, columns] -> the same.
    """
    mesh = matrices[0].device_mesh
    own = mesh.get_local_rank()
    rows = [local(matrix) for matrix in matrices]
    sizes = [part.numel() for part in rows] + [0] * (mesh.size() - len(rows))
    of_own = [0] * mesh.size()
    if own < len(matrices):
        total, columns = matrices[own].shape
        each = -(-total // mesh.size())  # as torch cuts them: the last ranks may have less, or nothing
        of_own = [max(0, min(each, total - rank * each)) * columns for rank in range(mesh.size())]
    given = torch.cat([part.flatten() for part in rows])
    result = _exchanged(given, sizes, of_own, mesh.get_group())
    if own < len(matrices):
        result = compute(result.view(matrices[own].shape)).to(given.dtype).flatten()
    parts = torch.split(_exchanged(result, of_own, sizes, mesh.get_group()), sizes[: len(rows)])
    return [part.view(like.shape) for part, like in zip(parts, rows, strict=True)]


def _exchanged(values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Numbers for each rank -> numbers from each rank, laid end to end."""
    output = values.new_empty(sum(received))
    dist.all_to_all_single(output, values.contiguous(), received, sent, group=group)
    return output
