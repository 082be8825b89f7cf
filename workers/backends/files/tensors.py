"""safetensors files, written tensor by tensor: nothing is held twice, and every byte is hashed on its way to the disk.

    header: names, types, shapes, offsets ──► the tensors, largest elements first ──► write_durable ──► FileEntry

The format is https://huggingface.co/docs/safetensors: the header's length (u64), the header as JSON, the values.
"""

import ctypes
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

from corral.workers.checkpoint.durable_file import FileEntry, no_progress, write_durable

_DTYPE_NAMES: Final = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}
ONLY_FILE: Final = "model.safetensors"
"""The file of a model that has one; others have names that begin so, and are listed in:"""
INDEX: Final = f"{ONLY_FILE}.index.json"
_ALIGNMENT: Final = 8  # of the values within the file, so that a reader can map the widest of them in place


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    on_piece: Callable[[memoryview], None] | None = None,
    on_progress: Callable[[], None] = no_progress,
) -> FileEntry:
    """Writes tensors of any device as a new safetensors file, and forces it to disk.

    One tensor at a time is brought to the host, and made contiguous.

    Args:
        on_piece: is shown all bytes of the file in order, a whole tensor at a time, each valid during the call only.

    Raises:
        ValueError: if a tensor's type has no name in the format.
    """
    # Wide elements first: then each tensor begins at a multiple of its own element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = _header({name: tensors[name] for name in names})
    pieces = chain([memoryview(header)], _values(tensors[name] for name in names))
    watched = pieces if on_piece is None else _watched(pieces, on_piece)
    return write_durable(path, watched, on_progress=on_progress)


def stored_slices(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """What each tensor of a model's directory can be read from, by name; of the files no other numbers are read.

    Args:
        stack: closes the files.
    """
    index = directory / INDEX
    names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else {ONLY_FILE}
    paths = [path for name in sorted(names) if (path := directory / name).is_file()]
    files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
    return {name: file.get_slice(name) for file in files for name in file.keys()}


def _watched(pieces: Iterable[memoryview], to: Callable[[memoryview], None]) -> Iterator[memoryview]:
    for piece in pieces:
        to(piece)
        yield piece


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses other formats
    start = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"tensor {name} is of {tensor.dtype}, which safetensors files are not written with here")
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _values(tensors: Iterator[Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        # Not by way of numpy: torch would never again let the memory go of a tensor that numpy has seen.
        in_place = (ctypes.c_ubyte * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())
        yield memoryview(in_place).cast("B")


# Parts of large tensors in the files of many ranks, and any other parts of them read back.
#
#     a rank's parts ──stored_name──► "<name>[<first index>]" in its file        one file of each rank
#     wanted part ◄── what it has in common with the parts of this file, of that file, ... until nothing is missing
#
# A part is a box: it begins at an index and has a shape. So ranks may have cut the tensors by rows, by columns, or at
# any number of a row, whose beginning and end are boxes then, too.

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
