"""Where the tensors of safetensors files are, and the fingerprints of their bytes; without torch.

    file -> header: {name: dtype, shape, offsets} -> StoredTensor -> its bytes

Read by ourselves: each tensor of `safe_open` leaves some 60 bytes behind for good, and a server reads hundreds of them
for every train step.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

_LENGTH_BYTES: Final = 8  # of the header's length, https://huggingface.co/docs/safetensors
_FINGERPRINT_BYTES: Final = 8


class _Entry(msgspec.Struct):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    path: Path
    begin: int
    """Its first byte in the file."""
    size_bytes: int
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]

    def read_into(self, buffer: memoryview) -> None:
        """OSError unless the file has as many bytes of it as the buffer."""
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            if not buffer.nbytes == self.size_bytes == file.readinto(buffer):
                raise OSError(f"{self.path} ends within a tensor, or has another size of it than its header says")

    def fingerprint(self) -> str:
        """Of its bytes in the file."""
        buffer = memoryview(bytearray(self.size_bytes))
        self.read_into(buffer)
        return fingerprint(buffer)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Those of a file by name.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """
    with open(path, "rb") as file:
        start = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if start > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{path} is cut off, or no safetensors file")
        header = msgspec.json.decode(file.read(start - _LENGTH_BYTES), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    return {
        name: StoredTensor(path, start + begin, end - begin, entry.dtype, entry.shape)
        for name, entry in entries.items()
        for begin, end in [entry.data_offsets]
    }


def fingerprint(data: memoryview) -> str:
    """The first 8 bytes of the SHA-256 of a tensor's bytes, as 16 hexadecimal digits."""
    return hashlib.sha256(data).digest()[:_FINGERPRINT_BYTES].hex()
