"""Parts of large tensors in the files of many ranks, and any other parts of them read back.

    a rank's parts ──stored_name──► "<name>[<first index>]" in its file        one file of each rank
    wanted part ◄── what it has in common with the parts of this file, of that file, ... until nothing is missing

A part is a box: it begins at an index and has a shape. So ranks may have cut the tensors by rows, by columns, or at any
number of a row, whose beginning and end are boxes then, too.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor


class Part(NamedTuple):
    """Some of a tensor's values."""

    name: str
    """Of the whole tensor."""
    start: tuple[int, ...]
    """Where the part begins in it, by dimension."""
    values: Tensor
    """As many dimensions as the whole one has; a view of the memory that they are kept in."""


def stored_name(name: str, start: Sequence[int]) -> str:
    """What a file calls the part of a tensor that begins there."""
    return f"{name}[{','.join(map(str, start))}]"


class PartFiles:
    """The files of all ranks, each opened when something is sought that the ones before it lack.

    Parts of one tensor in several files are the same, or have no value in common.
    """

    def __init__(self, paths: Sequence[Path], stack: ExitStack) -> None:
        """
        Args:
            paths: in the order in which they are searched.
            stack: closes them.
        """
        self._paths = paths
        self._stack = stack
        self._opened: list[_PartFile] = []

    def fill(self, part: Part) -> None:
        """Read a part's values into it; of the files no others are read.

        Raises:
            ValueError: if some of them are in no file.
        """
        missing = part.values.numel()
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        files = self._each()
        while missing:
            file = next(files, None)
            if file is None:
                raise ValueError(
                    f"{self._paths[0].parent} lacks {missing} of the values of {part.name}: files are missing"
                )
            for start in file.starts.get(part.name, ()):
                stored = file.slice_of(part.name, start)
                box = (start, tuple(stored.get_shape()))
                if box not in seen:  # ranks that hold the same have all written it
                    seen.add(box)
                    missing -= _copy_common(stored, box, part)

    def _each(self) -> Iterator["_PartFile"]:
        for index, path in enumerate(self._paths):
            if index == len(self._opened):
                self._opened.append(_PartFile(self._stack.enter_context(safe_open(path, framework="pt"))))
            yield self._opened[index]


class _PartFile:
    def __init__(self, file: Any) -> None:
        self.starts: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
        """Where the file's parts of each tensor begin."""
        self._file = file
        for stored in file.keys():
            name, _, start = stored.removesuffix("]").rpartition("[")
            self.starts[name].append(tuple(map(int, start.split(","))))

    def slice_of(self, name: str, start: tuple[int, ...]) -> Any:
        """What values can be read from, and only those that are asked for."""
        return self._file.get_slice(stored_name(name, start))


def _copy_common(stored: Any, box: tuple[tuple[int, ...], tuple[int, ...]], part: Part) -> int:
    """Read what a stored part and a wanted one have in common into the wanted one; how many values it is."""
    source, target = [], []
    for stored_start, stored_size, start, size in zip(*box, part.start, part.values.shape, strict=True):
        first, last = max(stored_start, start), min(stored_start + stored_size, start + size)
        if first >= last:
            return 0
        source.append(slice(first - stored_start, last - stored_start))
        target.append(slice(first - start, last - start))
    values: Tensor = stored[tuple(source)]
    part.values[tuple(target)].copy_(values)
    return values.numel()
