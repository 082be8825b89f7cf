"""How the values of a parcel lie one behind the other: both ends know it, so that nothing but values travels.

    key 1 of uid 1 | key 1 of uid 2 | ... | key 2 of uid 1 | key 2 of uid 2 | ...      wide types first: no gaps needed

The sender gathers the arrays in this order; the receiver knows the number of tokens of each answer from the request,
and with the declared layout and type of each key all lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.scheduling.redistribution import Parcel
from corral.workers.data.sequence_sample import Array, KeySpecs, SequenceSample, key_spec

Bytes = npt.NDArray[np.uint8]

NumTokens = Mapping[str, Sequence[int]]
"""uid -> tokens of each answer."""


def keys_in_order(parcel: Parcel, specs: KeySpecs) -> list[str]:
    """The parcel's keys as they travel."""
    return sorted(parcel.keys, key=lambda key: (-key_spec(key, specs).dtype.itemsize, key))


@dataclass(frozen=True, slots=True)
class IncomingParcel:
    """What a receiver knows of a parcel before it comes."""

    parcel: Parcel
    seqlens: dict[str, list[list[int]]]
    """By key and sample, the lengths of the answers; the keys in the order in which they travel."""
    array_lengths: list[int]
    """The number of values of each array, in the order in which they travel."""
    dtypes: list[np.dtype[Any]]
    """Of each array."""
    specs: KeySpecs
    """Of all keys that are declared."""

    @classmethod
    def expected(cls, parcel: Parcel, num_tokens: NumTokens, declared: KeySpecs) -> "IncomingParcel":
        """
        Raises:
            ValueError: if the length of a sample is not stated.
        """
        if unknown := [uid for uid in parcel.uids if uid not in num_tokens]:
            raise ValueError(f"samples {unknown[:3]} are to come from rank {parcel.source}, but nobody said how long")
        specs = {key: declared[key] for key in keys_in_order(parcel, declared)}
        # Once for each way to count: there are few, and many samples.
        counting = {(spec.layout, spec.shape): spec for spec in specs.values()}
        lengths = {way: [spec.lengths(num_tokens[uid]) for uid in parcel.uids] for way, spec in counting.items()}
        totals = {way: [sum(of_uid) for of_uid in counted] for way, counted in lengths.items()}
        return cls(
            parcel,
            {key: lengths[spec.layout, spec.shape] for key, spec in specs.items()},
            [total for spec in specs.values() for total in totals[spec.layout, spec.shape]],
            [spec.dtype for spec in specs.values() for _ in parcel.uids],
            declared,
        )

    @property
    def size_bytes(self) -> int:
        """Of all values."""
        return sum(map(mul, self.array_lengths, self._itemsizes()))

    def cut(self, packed: Bytes) -> list[Array]:
        """Each array, as a view."""
        starts = accumulate(map(mul, self.array_lengths, self._itemsizes()), initial=0)
        return [
            np.ndarray((length,), dtype, packed, start)
            for length, dtype, start in zip(self.array_lengths, self.dtypes, starts, strict=False)
        ]

    def samples(self, arrays: Sequence[Array]) -> list[SequenceSample]:
        """The samples, given the arrays in the order in which they travel."""
        num_uids = len(self.parcel.uids)
        return [
            SequenceSample(
                [uid],
                {key: [of_key[index]] for key, of_key in self.seqlens.items()},
                dict(zip(self.seqlens, arrays[index::num_uids], strict=True)),
                self.specs,
            )
            for index, uid in enumerate(self.parcel.uids)
        ]

    def _itemsizes(self) -> list[int]:
        return [dtype.itemsize for dtype in self.dtypes]
