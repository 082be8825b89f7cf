"""safetensors files, written tensor by tensor: nothing is held twice, and every byte is hashed on its way to the disk.

    header: names, types, shapes, offsets ──► the tensors, largest elements first ──► write_durable ──► FileEntry

The format is https://huggingface.co/docs/safetensors: the header's length (u64), the header as JSON, the values.
"""

import ctypes
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Final

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
    shown = pieces if on_piece is None else _shown(pieces, on_piece)
    return write_durable(path, shown, on_progress=on_progress)


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


def _shown(pieces: Iterable[memoryview], to: Callable[[memoryview], None]) -> Iterator[memoryview]:
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
