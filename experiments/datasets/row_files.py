"""Rows of files, read one at a time from where they lie: nothing of a file is held in memory but where its rows begin.

    JSON lines   mapped, and the byte at which each line ends     8 bytes a row
    Arrow        mapped, and the record batches                   a few hundred bytes a batch

Both are read in place, by number. What cannot be (Parquet, CSV) is written down as Arrow first, see formats.py.
"""

import codecs
import hashlib
import mmap
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from corral.experiments.regular_file import open_regular

if TYPE_CHECKING:
    import pyarrow

_LINE_FEED = re.compile(rb"\n")
_WHOLE_BYTES = 64 << 20  # of a larger file, blocks stand for the whole
_BLOCK_BYTES, _NUM_BLOCKS = 1 << 16, 64
_ARROW_FILE = b"ARROW1"
_DECODER = msgspec.json.Decoder()


class RowFile(Protocol):
    """One file, or what stands for one."""

    def __len__(self) -> int:
        """Rows, and lines that are none."""

    def read(self, number: int) -> Any:
        """What stands there, counted from 0; None for a line without anything.

        Raises:
            ValueError: if it is not JSON.
        """

    def columns(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Some fields of every row, each named once, None where it has none, and of lines without anything ().

        Raises:
            ValueError: as `read`.
        """


class JsonLines:
    """One JSON object a line.

    Args:
        source: a file, or what one is going to hold.
    """

    def __init__(self, source: Path | bytes) -> None:
        self._data: bytes | mmap.mmap = b""
        if isinstance(source, bytes):
            self._data = source
        else:
            with open_regular(source) as stream:
                if stream.seek(0, 2):  # nothing cannot be mapped
                    self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._first = len(codecs.BOM_UTF8) if self._data[:3] == codecs.BOM_UTF8 else 0
        self._ends = _line_ends(self._data)

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, number: int) -> Any:
        start = self._ends[number - 1] if number else self._first
        line = self._data[start : self._ends[number]]
        return _DECODER.decode(line) if line.strip() else None

    def columns(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        # Nothing else of a row is decoded.
        renamed = {f"value_{at}": name for at, name in enumerate(names)}
        row: Any = msgspec.defstruct("Row", [(own, Any, None) for own in renamed], rename=renamed)
        decode, data, start = msgspec.json.Decoder(row).decode, self._data, self._first
        for end in self._ends:
            line = data[start:end]
            yield () if not line.strip() else msgspec.structs.astuple(decode(line))
            start = end


class ArrowRows:
    """The rows of one file in either of Arrow's two forms, compressed or not."""

    def __init__(self, path: Path) -> None:
        import pyarrow.ipc  # only who has such files pays for it

        with open_regular(path) as stream:
            is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
        source = pyarrow.memory_map(str(path))
        self._batch: Callable[[int], Any]
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            # Compressed ones are unpacked when they are asked for, so few of them are kept.
            self._batch, num_batches = lru_cache(maxsize=4)(reader.get_batch), reader.num_record_batches
        else:
            batches = list(pyarrow.ipc.open_stream(source))
            self._batch, num_batches = batches.__getitem__, len(batches)
        sizes = [int(self._batch(number).num_rows) for number in range(num_batches)]
        self._starts: list[int] = list(accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, number: int) -> Any:
        at = bisect_right(self._starts, number) - 1
        batch = self._batch(at).slice(number - self._starts[at], 1)
        return {name: value for name in batch.schema.names for value in _values(batch.column(name))}

    def columns(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        for number in range(len(self._starts) - 1):
            batch: pyarrow.RecordBatch = self._batch(number)
            has = batch.schema.names
            yield from zip(
                *(plain(_values(batch.column(name))) if name in has else repeat(None, len(batch)) for name in names),
                strict=True,
            )


def _values(column: "pyarrow.Array") -> list[Any]:
    """As JSON lines would have them."""
    return [_without_fillers(value, column.type) for value in column.to_pylist(maps_as_pydicts="lossy")]


def _without_fillers(value: Any, kind: "pyarrow.DataType") -> Any:
    """All structs of a column have the same fields, so those that are null are left out: nobody can tell them from
    those that a row does not have. Values of the type Json, which `datasets` gives to what differs from row to row, are
    what their text says."""
    from pyarrow import JsonType, StructType

    if value is None:
        return None
    if isinstance(kind, JsonType):
        return msgspec.json.decode(value)
    if isinstance(kind, StructType):
        given = {key: one for key, one in value.items() if one is not None}
        return {key: _without_fillers(one, kind.field(key).type) for key, one in given.items()}
    if isinstance(value, list):
        return [_without_fillers(one, kind.value_type) for one in value]
    return value


def plain(value: Any) -> Any:
    """The values of a row as JSON, as rewards and agents receive them: times by ISO 8601, decimal numbers as text,
    bytes as base64."""
    # Times of pandas are none of Python's.
    return msgspec.to_builtins(value, enc_hook=lambda other: other.isoformat())


class RowFiles(Sequence[Any]):
    """Several files, one after the other: rows are numbered through."""

    def __init__(self, files: Mapping[str, RowFile], *, line_word: str) -> None:
        """
        Args:
            files: by what people call them.
            line_word: what stands between a file's name and a number counted from 1.
        """
        self._names, self._files, self._line_word = list(files), list(files.values()), line_word
        self._starts = list(accumulate(map(len, self._files), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: Any) -> Any:
        at = self._file_of(number)
        return self._files[at].read(number - self._starts[at])

    def columns(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Some fields of every row, as that of `RowFile`; a name may come more than once."""
        unique = list(dict.fromkeys(names))
        places = [unique.index(name) for name in names]
        for values in chain.from_iterable(file.columns(unique) for file in self._files):
            yield values if len(unique) == len(places) or not values else tuple(values[at] for at in places)

    def place(self, number: int) -> str:
        """Where a row stands: train.jsonl:41."""
        at = self._file_of(number)
        return f"{self._names[at]}{self._line_word}{number - self._starts[at] + 1}"

    @cached_property
    def names(self) -> str:
        """What people call all of it."""
        more = f" and {len(self._names) - 1} more" if len(self._names) > 1 else ""
        return self._names[0] + more

    def _file_of(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1


def fingerprint(files: Sequence[Path | bytes]) -> str:
    """By which a change is noticed: SHA-256 of the content, and of large files that of their size and of blocks, the
    first and the last among them. A change of a large file that leaves its size and all these blocks is not noticed.

    Raises:
        OSError: if one cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        if isinstance(file, bytes):
            digest.update(file)
            continue
        with open_regular(file) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            if size <= _WHOLE_BYTES:
                digest.update(stream.read())
                continue
            digest.update(b"%d" % size)
            for block in range(_NUM_BLOCKS):
                stream.seek((size - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1))
                digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _line_ends(data: bytes | mmap.mmap) -> "array[int]":
    """[lines] int64: the byte behind each line, its line feed included."""
    ends = array("q", (found.end() for found in _LINE_FEED.finditer(data)))
    if len(data) and (not ends or ends[-1] != len(data)):
        ends.append(len(data))
    return ends
