"""How the values of a parcel lie one behind the other: both ends know it, so that nothing but values travels.

    key 1 of uid 1 | key 1 of uid 2 | ... | key 2 of uid 1 | key 2 of uid 2 | ...      wide types first: no gaps needed

The sender gathers the arrays in this order; the receiver knows the number of tokens of each answer from the request,
and with the declared layout and type of each key all lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.scheduling.redistribution import Parcel
from corral.workers.data.sequence_sample import Array, SequenceSample, key_spec

Bytes = npt.NDArray[np.uint8]

NumTokens = Mapping[str, Sequence[int]]
"""uid -> tokens of each answer."""


def keys_in_order(parcel: Parcel) -> list[str]:
    """The parcel's keys as they travel."""
    return sorted(parcel.keys, key=lambda key: (-key_spec(key).dtype.itemsize, key))


def pack(arrays: Sequence[Array]) -> Bytes:
    """The bytes of these arrays, one behind the other."""
    packed = np.empty(sum(array.nbytes for array in arrays), np.uint8)
    np.concatenate([np.ascontiguousarray(array).view(np.uint8) for array in arrays], out=packed)
    return packed


@dataclass(frozen=True, slots=True)
class IncomingParcel:
    """What a receiver knows of a parcel before it comes."""

    parcel: Parcel
    seqlens: dict[str, list[list[int]]]
    """In the order in which the keys travel."""

    @classmethod
    def expected(cls, parcel: Parcel, num_tokens: NumTokens) -> "IncomingParcel":
        """
        Raises:
            ValueError: if the length of a sample is not stated.
        """
        if unknown := [uid for uid in parcel.uids if uid not in num_tokens]:
            raise ValueError(f"samples {unknown[:3]} are to come from rank {parcel.source}, but nobody said how long")
        return cls(
            parcel,
            {
                key: [[key_spec(key).layout.length(tokens) for tokens in num_tokens[uid]] for uid in parcel.uids]
                for key in keys_in_order(parcel)
            },
        )

    @property
    def array_bytes(self) -> list[int]:
        """The size of each array, in the order in which they travel."""
        return [
            sum(lengths) * key_spec(key).dtype.itemsize for key, of_key in self.seqlens.items() for lengths in of_key
        ]

    @property
    def size_bytes(self) -> int:
        """Of all values."""
        return sum(self.array_bytes)

    def cut(self, packed: Bytes) -> list[Bytes]:
        """The bytes of each array, as views."""
        ends = list(accumulate(self.array_bytes, initial=0))
        return [packed[start:end] for start, end in zip(ends[:-1], ends[1:], strict=True)]

    def samples(self, arrays: Sequence[npt.NDArray[Any]]) -> list[SequenceSample]:
        """The samples, given the bytes of each array in the order in which they travel."""
        num_uids = len(self.parcel.uids)
        return [
            SequenceSample(
                [uid],
                {key: [of_key[index]] for key, of_key in self.seqlens.items()},
                {
                    key: arrays[number * num_uids + index].view(key_spec(key).dtype)
                    for number, key in enumerate(self.seqlens)
                },
            )
            for index, uid in enumerate(self.parcel.uids)
        ]
