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
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from corral.experiments.config.model import MuonConfig, OptimizerConfig
from corral.workers.backends.fsdp.dealt_matrices import can_be_dealt, compute_dealt, rounds_of
from corral.workers.backends.fsdp.experts import expert_matrices
from corral.workers.backends.hosted_state import HostedState
from corral.workers.backends.sharding import cut_like, layers_of, local
from corral.workers.backends.train_state import ADAMW

_ADAMW_UPDATE = 0.2  # root mean square of AdamW's updates, in units of the learning rate, as Liu et al. measured it
_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's: steepest at 0, and between 0.7 and 1.2 after five steps
_MUON = frozenset({"momentum_buffer"})
_TINY = 1e-7  # keeps a gradient of zeros at zero


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, *, compute_dtype: torch.dtype, is_hosted: bool = False
) -> "AdamWAndMuon":
    """The optimizer of the parameters that are trained; `set_learning_rate` must be called before each step.

    Args:
        model: cut over the ranks already, where it is.
        compute_dtype: of Muon's matrix products.
        is_hosted: whether its state lies in host memory but for the moments in which it is used.
    """
    layers = layers_of(model)
    matrices = {p: int(p.ndim == 2) for layer in layers for p in layer.parameters()} | expert_matrices(layers)
    groups: dict[tuple[int, bool, bool], list[nn.Parameter]] = {}
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        num_matrices = matrices.get(parameter, 0) if config.type == "muon" else 0
        decays = parameter.ndim >= 2 or config.decays_biases_and_norms
        is_cut = isinstance(parameter, DTensor)  # torch steps either kind in one call, and not both
        groups.setdefault((num_matrices, decays, is_cut), []).append(parameter)
    muon = config.muon or MuonConfig()
    return AdamWAndMuon(
        [
            {
                "params": parameters,
                "weight_decay": config.weight_decay if decays else 0.0,
                "num_matrices": num_matrices,  # to orthogonalize in each, or in each expert's part; 0: AdamW's
                "lr_ratio": muon.lr_ratio if num_matrices else 1.0,
            }
            for (num_matrices, decays, _), parameters in groups.items()
        ],
        config,
        muon,
        compute_dtype=compute_dtype,
        is_hosted=is_hosted,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group its share of the rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_ratio"]


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
        muon: MuonConfig,
        *,
        compute_dtype: torch.dtype,
        is_hosted: bool,
    ) -> None:
        super().__init__(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
        self.hosted = HostedState(self.state) if is_hosted else None
        """Where the state lies, if not on the device."""
        self._muon = muon
        self._compute_dtype = compute_dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; a collective where they are cut."""
        if self.hosted is None:
            return self._step_groups(self.param_groups)
        groups = {
            parameter: group
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        for parameter in self.hosted.visited(list(groups)):
            self._step_groups([{**groups[parameter], "params": [parameter]}])
        return None

    def _step_groups(self, groups: list[dict[str, Any]]) -> Any:
        for group in groups:
            if group["num_matrices"]:
                self._orthogonal_step([p for p in group["params"] if p.grad is not None], group)
        every, self.param_groups = self.param_groups, groups
        try:
            return super().step()
        finally:
            self.param_groups = every

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
        momentum.lerp_(gradient, 1.0 - self._muon.momentum)
        update = gradient.lerp(momentum, self._muon.momentum) if self._muon.nesterov else momentum
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
        return orthogonalized(matrices, steps=self._muon.newton_schulz_steps) * scale


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
