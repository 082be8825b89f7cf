"""Root mean square norm of the embedded engine: inputs [..., n] -> inputs / sqrt(mean(inputs ** 2) + epsilon) * weight.

Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. There are two norms per layer, and for a few rows each is all
overhead: torch's own is made of some fifteen operations on a CPU, this one of six, with the same roundings, so that the
numbers are those of the trainer bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Over a weight that somebody else owns and may overwrite in place."""

    weight: Tensor
    """[n]"""
    epsilon: float
    _epsilon: Tensor
    _width: Tensor

    @classmethod
    def of(cls, weight: Tensor, epsilon: float) -> RMSNorm:
        width = weight.new_tensor(weight.shape[0])
        return cls(weight, epsilon, weight.new_tensor(epsilon), width)

    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs [..., n] of the weight's dtype."""
        if inputs.device.type != "cpu" or inputs.dtype != torch.float32:
            return F.rms_norm(inputs, self.weight.shape, self.weight, self.epsilon)
        squares = (inputs * inputs).sum(dim=-1, keepdim=True)
        inverse = torch.addcdiv(self._epsilon, squares, self._width).rsqrt_()  # epsilon + squares / width, in one call
        return (inputs * inverse).mul_(self.weight)
