"""Parts of large tensors in the files of many ranks, and any other parts of them read back.

    a rank's parts ──stored_name──► "<name>[<first index>]" in its file        one file of each rank
    wanted part ◄── what it has in common with the parts of this file, of that file, ... until nothing is missing

A part is a box: it begins at an index and has a shape. So ranks may have cut the tensors by rows, by columns, or at any
number of a row, whose beginning and end are boxes then, too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from safetensors import safe_open
from torch import Tensor

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins in a whole tensor, and its size, by dimension."""


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


def fill_parts(parts: Iterable[Part], paths: Sequence[Path], *, on_progress: Callable[[], None]) -> None:
    """Read each part's values into it; of the files no others are read.

    Parts of one tensor in several files are the same, or have no value in common. A file is opened when something is
    sought that the ones before it lack.

    Args:
        paths: of the files of all ranks, in the order in which they are searched.
        on_progress: called after every part.

    Raises:
        ValueError: if some of the values are in no file.
    """
    with ExitStack() as stack:
        opened = cache(lambda path: _parts_in(stack.enter_context(safe_open(path, framework="pt"))))
        for part in parts:
            if missing := _num_missing(part, map(opened, paths)):
                raise ValueError(f"{paths[0].parent} lacks {missing} of the values of {part.name}: files are missing")
            on_progress()


def _num_missing(part: Part, files: Iterable[Mapping[str, list[tuple[tuple[int, ...], Any]]]]) -> int:
    """How many of a part's values are in none of the files, after those that are in one are read."""
    missing = part.values.numel()
    seen: set[Box] = set()
    for stored_parts in files if missing else ():
        for start, stored in stored_parts.get(part.name, ()):
            box = (start, tuple(stored.get_shape()))
            if box not in seen:  # ranks that hold the same have all written it
                seen.add(box)
                missing -= _copy_common(stored, box, part)
        if not missing:
            break
    return missing


def _parts_in(file: Any) -> Mapping[str, list[tuple[tuple[int, ...], Any]]]:
    """Where a file's parts of each tensor begin, and what their values can be read from."""
    parts: defaultdict[str, list[tuple[tuple[int, ...], Any]]] = defaultdict(list)
    for stored in file.keys():
        name, _, start = stored.removesuffix("]").rpartition("[")
        parts[name].append((tuple(map(int, start.split(","))), file.get_slice(stored)))
    return parts


def _copy_common(stored: Any, box: Box, part: Part) -> int:
    """Read what a stored part and a wanted one have in common into the wanted one; how many values it is."""
    if (found := common(box, (part.start, tuple(part.values.shape)))) is None:
        return 0
    source, target = found
    values: Tensor = stored[source]
    part.values[target].copy_(values)
    return values.numel()


def common(box: Box, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where what two boxes have in common is in the one and in the other; None if it is nothing."""
    places: list[tuple[slice, slice]] = []
    for start, size, other_start, other_size in zip(*box, *other, strict=True):
        first, end = max(start, other_start), min(start + size, other_start + other_size)
        if first >= end:
            return None
        places.append((slice(first - start, end - start), slice(first - other_start, end - other_start)))
    return tuple(own for own, _ in places), tuple(others for _, others in places)
