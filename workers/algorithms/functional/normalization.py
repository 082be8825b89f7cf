"""Means and standard deviations: of one batch over all ranks, of one prompt's answers, and running over many batches.

    advantages ──normalize_over_batch──► mean 0, standard deviation 1 over the tokens of all data-parallel ranks
    advantages ──normalize_per_group───► the same within the answers to each prompt

    returns ──updated──► RunningMoments ──normalize──► what the critic is trained towards
    what the critic says ──denormalize──► values in units of reward

Sums are float64: they are compared between runs that cut the same batch in different ways.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.workers.algorithms.functional.packed import mean_per_answer, per_token, sum_per_answer

SumOverRanks = Callable[[Mapping[str, float]], dict[str, float]]
"""Each number added up over the data-parallel ranks (`ParallelContext.sum_over_ranks`)."""

Floats = TypeVar("Floats", Tensor, npt.NDArray[np.float32])

_STD_EPS = 1e-5
_MIN_VARIANCE = 1e-2  # of running moments: with less spread than that, dividing would mostly enlarge noise


def normalize_over_batch(values: Tensor, mask: Tensor, *, sum_over_ranks: SumOverRanks) -> Tensor:
    """[T] float32: (value - mean) / (std + 1e-5) over the True entries of the mask on all ranks; 0 elsewhere.

    Andrychowicz et al. 2020, https://arxiv.org/abs/2006.05990, choice C67. The variance is the population's, from a
    second sum around the mean, since the square of a mean may be much larger than the variance.
    """
    chosen = values.double()[mask]
    first = sum_over_ranks({"count": float(chosen.numel()), "total": float(chosen.sum())})
    count = max(first["count"], 1.0)
    mean = first["total"] / count
    second = sum_over_ranks({"squares": float((chosen - mean).square().sum())})
    std = math.sqrt(second["squares"] / count)
    return torch.where(mask, (values.double() - mean) / (std + _STD_EPS), 0.0).float()


def normalize_per_group(
    values: Tensor, mask: Tensor, answer_lengths: Sequence[int], group_sizes: Sequence[int]
) -> Tensor:
    """[T] float32: the same over the tokens of all answers to one prompt, which are on one rank; 0 outside the mask."""
    lengths = sum_per_answer(torch.tensor(answer_lengths, dtype=torch.int64), group_sizes).tolist()
    wide = values.double()
    centred = wide - per_token(mean_per_answer(wide, mask, lengths), lengths)
    std = mean_per_answer(centred.square(), mask, lengths).sqrt()
    return torch.where(mask, centred / (per_token(std, lengths) + _STD_EPS), 0.0).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMoments:
    """Mean and standard deviation of what a critic predicts, over the steps of a whole run.

    With a decay they are exponential means of the batches' means, without the bias towards 0 that such a mean starts
    with (Yu et al. 2021, https://arxiv.org/abs/2103.01955; the idea is PopArt's, van
    Hasselt et al. 2016, https://arxiv.org/abs/1602.07714). Without one, every number ever seen weighs the same.
    Before the first update nothing is changed by either direction.
    """

    decay: float | None
    total: float = 0.0
    square_total: float = 0.0
    weight: float = 0.0

    def updated(self, *, count: float, total: float, square_total: float) -> "RunningMoments":
        """After one more batch of `count` numbers with these sums; the same if it is empty or not finite."""
        if count <= 0.0 or not (math.isfinite(total) and math.isfinite(square_total)):
            return self
        if self.decay is None:
            kept, added = 1.0, 1.0
        else:
            kept, added = self.decay, (1.0 - self.decay) / count
        return replace(
            self,
            total=kept * self.total + added * total,
            square_total=kept * self.square_total + added * square_total,
            weight=kept * self.weight + added * count,
        )

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight > 0.0 else 0.0

    @property
    def std(self) -> float:
        if self.weight <= 0.0:
            return 1.0
        return math.sqrt(max(self.square_total / self.weight - self.mean**2, _MIN_VARIANCE))

    def normalize(self, values: Floats) -> Floats:
        """From units of reward to those that the critic's head works in."""
        return (values - self.mean) / self.std

    def denormalize(self, values: Floats) -> Floats:
        """Back into units of reward."""
        return values * self.std + self.mean

    def state_dict(self) -> dict[str, float | list[float]]:
        """What a checkpoint keeps."""
        return {"total": self.total, "square_total": self.square_total, "weight": self.weight}

    def with_state(self, state: Mapping[str, float | list[float]]) -> "RunningMoments":
        """The moments that `state_dict` described."""
        numbers = {name: _number(name, state) for name in ("total", "square_total", "weight")}
        return replace(self, **numbers)


def _number(name: str, state: Mapping[str, float | list[float]]) -> float:
    value = state.get(name)
    if not isinstance(value, float | int):
        raise ValueError(f"the state of running moments needs the number {name!r}; it has {sorted(state)}")
    return float(value)
