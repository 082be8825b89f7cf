"""What every loss over tokens returns, before anything is added up.

    TokenLosses(losses [T], stats) ──mask, weights──► sums of a micro-batch ──► means over the global batch

A loss says what one token costs. Which tokens count, how much each, and by what the sum is divided is decided in one
place for all of them, so that the mean is exact however the batch is cut into micro-batches and ranks.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The loss of each token, whatever stands where the loss mask is False."""

    losses: Tensor
    """[T] float, with gradient."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """[T] each, without gradient; reported as means over the tokens of the loss mask."""
