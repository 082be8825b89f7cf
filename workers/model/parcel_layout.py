"""How the values of a parcel lie one behind the other: both ends know it, so that nothing but values travels.

    key 1 of uid 1 | key 1 of uid 2 | ... | key 2 of uid 1 | key 2 of uid 2 | ...      wide types first: no gaps needed

The sender gathers the arrays in this order; the receiver knows the number of tokens of each answer from the request,
and with the declared layout and type of each key all lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    """By key and sample, the lengths of the answers; the keys in the order in which they travel."""
    array_bytes: list[int]
    """The size of each array, in the order in which they travel."""
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
        # Once for each layout: there are few, and many samples.
        lengths = {
            layout: [[layout.length(tokens) for tokens in num_tokens[uid]] for uid in parcel.uids]
            for layout in {spec.layout for spec in specs.values()}
        }
        totals = {layout: [sum(of_uid) for of_uid in of_layout] for layout, of_layout in lengths.items()}
        return cls(
            parcel,
            {key: lengths[spec.layout] for key, spec in specs.items()},
            [total * spec.dtype.itemsize for spec in specs.values() for total in totals[spec.layout]],
            declared,
        )

    @property
    def size_bytes(self) -> int:
        """Of all values."""
        return sum(self.array_bytes)

    def cut(self, packed: Bytes) -> list[Bytes]:
        """The bytes of each array, as views."""
        ends = list(accumulate(self.array_bytes, initial=0))
        return [packed[start:end] for start, end in zip(ends[:-1], ends[1:], strict=True)]

    def samples(self, arrays: Sequence[Array]) -> list[SequenceSample]:
        """The samples, given the bytes of each array in the order in which they travel."""
        num_uids = len(self.parcel.uids)
        dtypes = [self.specs[key].dtype for key in self.seqlens]
        by_key = [
            [array.view(dtype) for array in arrays[number * num_uids : (number + 1) * num_uids]]
            for number, dtype in enumerate(dtypes)
        ]
        return [
            SequenceSample(
                [uid],
                {key: [of_key[index]] for key, of_key in self.seqlens.items()},
                {key: of_key[index] for key, of_key in zip(self.seqlens, by_key, strict=True)},
                self.specs,
            )
            for index, uid in enumerate(self.parcel.uids)
        ]
