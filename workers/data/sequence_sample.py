"""Packed samples: dataset -> rollout worker -> data store -> redistribution -> algorithm, always in this one form.

A sample is one prompt, named by its uid, with the group of its answers. Every key stores the values of all answers of
all samples in one flat array, answer after answer, and `seqlens` says where each answer ends:

    uids    = ["0:a", "0:b"]
    seqlens = {"input_ids": [[4, 3], [5]],    "old_logprobs": [[3, 2], [4]],   "rewards": [[1, 1], [1]]}
    data    = {"input_ids": 12 token ids,     "old_logprobs": 9 numbers,       "rewards": 3 numbers}
               `--- 0:a, answer 0 (4) | 0:a, answer 1 (3) | 0:b, answer 0 (5)

An answer is one sequence, or an episode of several: then `episodes` says which sequences belong together, as
neighbours, and everything else is of sequences.

    episodes = [0, 0, 1]     two sequences of the first answer to a prompt, one of the second

A key whose values are arrays themselves (its declared `shape`) has their numbers one after the other, and `seqlens`
counts the numbers.

Arrays are numpy: what an algorithm computes with torch on the way comes back as numpy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, groupby, islice
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.scheduling.keys import BUILT_IN_KEYS, EPISODES, DeclaredKeys, Key, find_declared

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSample:
    """Some samples and some of their keys, packed. See the module's docstring for the picture."""

    uids: list[str]
    seqlens: dict[str, list[list[int]]]
    data: dict[str, Array]
    specs: DeclaredKeys = field(default_factory=lambda: BUILT_IN_KEYS)
    """Every key that is declared where this sample is, whether it has it or not; what is made of a sample knows the
    same ones."""

    def __post_init__(self) -> None:
        if len(set(self.uids)) != len(self.uids):
            repeated = next(uid for uid in self.uids if self.uids.count(uid) > 1)
            raise ValueError(f"sample uid {repeated!r} occurs more than once; every uid must be unique")
        if self.data.keys() != self.seqlens.keys():
            raise ValueError(
                f"data has keys {sorted(self.data)}, and seqlens say of {sorted(self.seqlens)} how it is cut"
            )
        for key, lengths in self.seqlens.items():
            if len(lengths) != len(self.uids):
                raise ValueError(f"seqlens of {key!r} cover {len(lengths)} samples, but there are {len(self.uids)}")
            if self.data[key].shape != (expected := self.total_length(key),):
                shape = tuple(self.data[key].shape)
                raise ValueError(f"data of {key!r} has shape {shape}; its seqlens add up to [{expected}]")

    # --- building ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_group(
        cls, uid: str, answers: Mapping[str, Sequence[npt.ArrayLike]], *, specs: DeclaredKeys = BUILT_IN_KEYS
    ) -> "SequenceSample":
        """One sample from per-answer arrays, cast to the declared types.

            SequenceSample.from_group("0:a", {"input_ids": [[5, 6, 7], [5, 8]], "rewards": [1.0, 0.0]})

        Raises:
            ValueError: on an undeclared key, a wrong number of answers, a length that its layout does not allow, or
                sequences of an episode that are no neighbours.
        """
        if "input_ids" not in answers:
            raise ValueError(f"sample {uid!r} has no 'input_ids': the other keys are measured against them")
        num_tokens = [np.atleast_1d(np.asarray(ids)).shape[0] for ids in answers["input_ids"]]
        seqlens: dict[str, list[list[int]]] = {}
        data: dict[str, Array] = {}
        for key, values in answers.items():
            spec = find_declared(key, specs)
            arrays = _answer_arrays(uid, key, spec, values, num_tokens)
            seqlens[key] = [[array.shape[0] for array in arrays]]
            data[key] = np.concatenate(arrays) if arrays else np.empty(0, spec.dtype)
        numbers = data.get(EPISODES, np.empty(0))
        if numbers.size and (numbers[0] != 0 or not np.isin(np.diff(numbers), (0, 1)).all()):
            raise ValueError(
                f"sample {uid!r} has the episodes {numbers.tolist()[:16]}; they count from 0 without a gap, and "
                "sequences of one episode are neighbours"
            )
        return cls([uid], seqlens, data, specs)

    @classmethod
    def gather(
        cls,
        samples: "Sequence[SequenceSample]",
        *,
        keys: Iterable[str] | None = None,
        specs: DeclaredKeys | None = None,
    ) -> "SequenceSample":
        """The samples one after the other; all must hold the same keys, or at least those asked for. One stays a view.

        Args:
            specs: the keys that are declared; None for those that the first sample knows.
        """
        if specs is None:
            specs = samples[0].specs if samples else BUILT_IN_KEYS
        chosen = list(keys) if keys is not None else list(samples[0].seqlens) if samples else []
        for sample in samples:
            missing = [key for key in chosen if key not in sample.seqlens]
            if missing or (keys is None and len(sample.seqlens) != len(chosen)):
                raise ValueError(
                    f"cannot gather different keys: {samples[0].uids[:1]} has {sorted(samples[0].seqlens)}, "
                    f"{sample.uids[:1]} has {sorted(sample.seqlens)}; name the common keys"
                )
        arrays = {
            key: [s.data[key] for s in samples] or [np.empty(0, find_declared(key, specs).dtype)] for key in chosen
        }
        return cls(
            [uid for sample in samples for uid in sample.uids],
            {key: [lengths for sample in samples for lengths in sample.seqlens[key]] for key in chosen},
            {key: parts[0] if len(parts) == 1 else np.concatenate(parts) for key, parts in arrays.items()},
            specs,
        )

    # --- cutting ----------------------------------------------------------------------------------------------------

    def unpack(self) -> "list[SequenceSample]":
        """One sample per uid; their arrays are views of this one's."""
        offsets = {key: _offsets(sum(lengths) for lengths in self.seqlens[key]) for key in self.data}
        return [
            SequenceSample(
                [uid],
                {key: [list(lengths[index])] for key, lengths in self.seqlens.items()},
                {key: array[offsets[key][index] : offsets[key][index + 1]] for key, array in self.data.items()},
                self.specs,
            )
            for index, uid in enumerate(self.uids)
        ]

    def select_answers(self, answers: Iterable[int]) -> "SequenceSample":
        """These answers in their present order, still grouped by prompt; samples without any of them are left out.

        Args:
            answers: numbers, counted over all samples.
        """
        counts = self.num_answers_per_sample()
        is_chosen = np.zeros(sum(counts), np.bool_)
        is_chosen[list(answers)] = True
        by_sample = np.split(is_chosen, np.cumsum(counts)[:-1])
        kept = [index for index, of_sample in enumerate(by_sample) if of_sample.any()]
        return SequenceSample(
            [self.uids[index] for index in kept],
            {
                key: [list(compress(lengths[index], by_sample[index])) for index in kept]
                for key, lengths in self.seqlens.items()
            },
            {key: array[np.repeat(is_chosen, self.answer_lengths(key))] for key, array in self.data.items()},
            self.specs,
        )

    def select_keys(self, keys: Iterable[str]) -> "SequenceSample":
        """The same samples with these keys only."""
        chosen = list(keys)
        missing = [key for key in chosen if key not in self.seqlens]
        if missing:
            raise ValueError(f"samples have no keys {missing}; they have {sorted(self.seqlens)}")
        data = {key: self.data[key] for key in chosen}
        return SequenceSample(self.uids, {key: self.seqlens[key] for key in chosen}, data, self.specs)

    def remap_keys(self, new_name_by_key: Mapping[str, str]) -> "SequenceSample":
        """The same samples with keys renamed; keys that are not named keep theirs."""
        renamed = [new_name_by_key.get(key, key) for key in self.seqlens]
        if len(set(renamed)) != len(renamed):
            raise ValueError(f"renaming {dict(new_name_by_key)} gives two keys one name among {sorted(renamed)}")
        # The declared keys, with those that get a name that nobody declares.
        new = {name: self.specs[key] for key, name in new_name_by_key.items() if key in self.specs}
        return SequenceSample(
            self.uids,
            {new_name_by_key.get(key, key): lengths for key, lengths in self.seqlens.items()},
            {new_name_by_key.get(key, key): array for key, array in self.data.items()},
            self.specs if new.keys() <= self.specs.keys() else MappingProxyType({**new, **self.specs}),
        )

    def answer_names(self) -> list[str]:
        """`{uid}#{answer}` of each answer, over all samples."""
        counts = self.num_answers_per_sample()
        return [f"{uid}#{answer}" for uid, count in zip(self.uids, counts, strict=True) for answer in range(count)]

    # --- changing ---------------------------------------------------------------------------------------------------

    def update_(self, other: "SequenceSample") -> None:
        """Take over the keys of `other`, which must hold the same uids in the same order."""
        if other.uids != self.uids:
            raise ValueError(f"cannot merge keys of samples {other.uids[:3]}... into those of {self.uids[:3]}...")
        self.seqlens.update(other.seqlens)
        self.data.update(other.data)

    def with_key(self, key: str | Key, array: Array) -> "SequenceSample":
        """The same samples with one key added, cut as its layout says.

        Args:
            key: the name of a declared key, or a declaration.
        """
        specs = self.specs
        if isinstance(key, Key):
            specs = specs if specs.get(key.name) == key else {**specs, key.name: key}
            key = key.name
        spec = find_declared(key, specs)
        lengths = [spec.lengths(group) for group in self.seqlens["input_ids"]]
        return SequenceSample(self.uids, self.seqlens | {key: lengths}, self.data | {key: array}, specs)

    # --- measuring --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.uids)

    def answer_lengths(self, key: str = "input_ids") -> list[int]:
        """Number of values of each answer, over all samples."""
        return [length for group in self.seqlens[key] for length in group]

    def num_answers_per_sample(self) -> list[int]:
        """Group size of each sample."""
        key = "input_ids" if "input_ids" in self.seqlens else next(iter(self.seqlens), None)
        return [] if key is None else [len(group) for group in self.seqlens[key]]

    def episode_sizes(self) -> list[int]:
        """Number of sequences of each episode, over all samples; 1 each where nothing is said of episodes."""
        return [size for of_sample in self._episode_sizes() for size in of_sample]

    def num_episodes_per_sample(self) -> list[int]:
        """Number of episodes of each sample."""
        return [len(of_sample) for of_sample in self._episode_sizes()]

    def _episode_sizes(self) -> list[list[int]]:
        counts = self.num_answers_per_sample()
        if EPISODES not in self.data:
            return [[1] * count for count in counts]
        numbers = iter(self.data[EPISODES].tolist())
        return [[len(list(run)) for _, run in groupby(islice(numbers, count))] for count in counts]

    def total_length(self, key: str = "input_ids") -> int:
        """Number of values of `key` over all samples."""
        return sum(map(sum, self.seqlens[key]))


def _answer_arrays(
    uid: str, key: str, spec: Key, values: Sequence[npt.ArrayLike], num_tokens: Sequence[int]
) -> list[npt.NDArray[Any]]:
    """The answers' values of one key, cast and checked against their numbers of tokens."""
    if len(values) != len(num_tokens):
        raise ValueError(f"sample {uid!r} has {len(values)} answers in {key!r} but {len(num_tokens)} in 'input_ids'")
    arrays = [np.asarray(value, dtype=spec.dtype) for value in values]
    arrays = [array.reshape(-1) if spec.shape else np.atleast_1d(array) for array in arrays]
    for answer, (array, tokens) in enumerate(zip(arrays, num_tokens, strict=True)):
        expected = spec.length(tokens)
        if array.shape != (expected,):
            raise ValueError(
                f"sample {uid!r}, answer {answer}: {key!r} is {spec.layout.value} and needs {expected} values "
                f"for {tokens} tokens, got shape {array.shape}"
            )
    return arrays


def _offsets(lengths: Iterable[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def answer_slices(lengths: Sequence[int]) -> list[slice]:
    """Where each answer lies in a packed array whose answers have these lengths."""
    ends = _offsets(lengths)
    return [slice(start, end) for start, end in zip(ends[:-1], ends[1:], strict=True)]
