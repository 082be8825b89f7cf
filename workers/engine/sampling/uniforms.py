"""The random numbers of an answer, each a function of its seed and of where its token stands.

    sampling seed --of()--> TokenUniforms --token_uniforms(position)--> u in [0, 1) --> the token at that position
    engine seed   --of()--> TokenUniforms --seed(number)--> sampling seed of a request that brings none

There is no state: whoever knows the seed and the position draws the same number. So an answer that is made in chunks,
is retracted and computed again, moves to another server or outlives an engine draws what it would have drawn in one go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 2**64 - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # the odd number nearest to 2**64 / golden ratio
_FEWEST_BIT_CHANGES = 24  # below this a step of the counter changes too little for the mixer (the paper, section 5)
_ALTERNATING_BITS = 0xAAAAAAAAAAAAAAAA


@dataclass(frozen=True, slots=True)
class TokenUniforms:
    """SplitMix64 read at any place: 64-bit numbers mix(start + place * gamma), with a start and a gamma per seed.

    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
    https://doi.org/10.1145/2660193.2660195, with the mixer of their reference implementation. Two answers have
    different gammas, so that one never repeats a stretch of the other; neighbouring seeds and positions are
    independent as far as tests can tell. Not for secrets.

    Example:
        uniforms = TokenUniforms.of(7)
        uniforms.seed(12)     # the same wherever and whenever it is asked
    """

    start: int
    gamma: int
    """Odd, so that no two places within 2**64 have the same number."""

    @classmethod
    def of(cls, seed: int) -> TokenUniforms:
        """Of a seed; those that differ by a multiple of 2**64 are one."""
        gamma = _mix(seed + 2 * _GOLDEN_GAMMA) | 1
        if (gamma ^ (gamma >> 1)).bit_count() < _FEWEST_BIT_CHANGES:
            gamma ^= _ALTERNATING_BITS
        return cls(start=_mix(seed + _GOLDEN_GAMMA), gamma=gamma)

    @property
    def on_device(self) -> tuple[int, int]:
        """Start and gamma as int64, which is what tensors have: the same 64 bits."""
        return _signed(self.start), _signed(self.gamma)

    def seed(self, number: int) -> int:
        """In [0, 2**63), for the `number`-th of those that share this seed."""
        return _mix(self.start + number * self.gamma) >> 1


def token_uniforms(starts: Tensor, gammas: Tensor, positions: Tensor) -> Tensor:
    """The random numbers of tokens: float64 in [0, 1), multiples of 2**-53, where the tensors are.

    Args:
        starts, gammas: int64, as `TokenUniforms.on_device` gives them.
        positions: int64, the tokens before each, of prompt and answer. All three are broadcast.
    """
    value = starts + positions * gammas  # int64 wraps around, and its lower bits are those of unsigned numbers
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = (value ^ _shifted(value, shift)) * _signed(multiplier)
    return _shifted(value ^ _shifted(value, 31), 11).to(torch.float64) * 2.0**-53


def _shifted(value: Tensor, shift: int) -> Tensor:
    """`value` >> `shift` with zeros coming in; the shift of int64 brings in the sign."""
    return (value >> shift) & (_MASK >> shift)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(value: int) -> int:
    value &= _MASK
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & _MASK
    return value ^ (value >> 31)
