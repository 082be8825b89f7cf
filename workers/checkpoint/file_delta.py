"""Deltas of files: what changed against the same file of the version before, where little did.

    base ─┬─► elements that differ ─┬─► gaps between their positions ───────► bytes ─┬─► Huffman codes ──► a frame
    new ──┘                         └─► differences of their bit patterns ──► bytes ─┘

    the file:  magic │ length, header │ bytes covered, length, frame │ bytes covered, length, frame │ ...

One optimizer step changes few of the weights that are kept in bfloat16, and most of those to a neighbouring number: the
difference of the two as integers is then 1 or -1. What a delta gives is the new file bit for bit, whatever the bits
mean. That it was given, and not something else by a delta that is damaged, is what the new file's digest shows: nothing
here is a second checksum. Every frame is of at most `PIECE_BYTES` of the file, and no more than
some of these are held at a time.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Final, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from corral.workers.checkpoint.durable_file import PIECE_BYTES, FileEntry

Numbers: TypeAlias = npt.NDArray[Any]
"""Unsigned, of the size of an element."""

DELTA_SUFFIX: Final = ".delta"
"""Of the name of a delta, after that of its file."""

_MAGIC: Final = b"corral delta 3\n"
_HEADER_LENGTH: Final = struct.Struct("<I")
_FRAME: Final = struct.Struct("<II")  # bytes of the file that it covers, bytes of it
_COUNTS: Final = struct.Struct("<II")  # elements that change, bytes of their gaps
_RAW: Final = -15  # zlib's word for: without its own header and checksum
_MAX_HEADER_BYTES: Final = 2**16
_UNSIGNED: Final[dict[int, np.dtype[Any]]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_LARGE: Final = 255  # as a byte of a gap: there is more of it; of a difference: it stands behind all the small ones
_LARGE_DTYPE: Final = np.dtype("<u4")


class DeltaError(Exception):
    """A delta is damaged, or does not fit to the file that it is to be applied to; names what differs."""


class Readable(Protocol):
    """As much of a file as a base has to have."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of `buffer`; returns how many bytes, 0 at the end."""


class DeltaHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files that a delta leads from and to."""

    itemsize: int
    """Bytes of an element: 1, 2 or 4."""
    base: FileEntry
    result: FileEntry


# --- one piece of a file ----------------------------------------------------------------------------------------------


def encode_piece(base: memoryview, new: memoryview, *, itemsize: int) -> bytes:
    """What leads from `base` to `new`, pieces of the same number of bytes; empty if they are equal.

    Args:
        itemsize: bytes of an element: 1, 2 or 4. Any is right for any content; that of the content gives the least.

    Raises:
        ValueError: if the pieces are not of the same number of whole elements.
    """
    if base.nbytes != new.nbytes or new.nbytes % itemsize:
        raise ValueError(
            f"pieces of {base.nbytes} and {new.nbytes} bytes are not of the same number of elements of {itemsize} bytes"
        )
    old, present = _elements(base, itemsize), _elements(new, itemsize)
    positions = np.flatnonzero(old != present)
    if not positions.size:
        return b""
    gaps = _gap_bytes(np.diff(positions, prepend=-1) - 1)
    differences = _small_if_near_zero(present[positions] - old[positions])
    small = np.minimum(differences, _LARGE).astype(np.uint8).tobytes()
    large = differences[differences >= _LARGE].astype(_LARGE_DTYPE).tobytes()
    # Places and values look random, only some are more frequent than others: matches are not worth searching for.
    compressor = zlib.compressobj(1, wbits=_RAW, strategy=zlib.Z_HUFFMAN_ONLY)
    parts = [compressor.compress(_COUNTS.pack(positions.size, len(gaps)) + gaps)]
    parts += [compressor.flush(zlib.Z_SYNC_FLUSH), compressor.compress(small + large)]  # with a code of its own
    return b"".join([*parts, compressor.flush()])


def apply_piece(piece: memoryview, frame: bytes | memoryview, *, itemsize: int) -> None:
    """Turn `piece`, the base, into the `new` of which `encode_piece(base, new)` is `frame`.

    Raises:
        DeltaError: if the frame is damaged such that nothing can be made of it.
    """
    if not frame:
        return
    elements = _elements(piece, itemsize)
    try:
        payload = zlib.decompress(frame, wbits=_RAW)
        count, num_gap_bytes = _COUNTS.unpack_from(payload)
        end_of_gaps = _COUNTS.size + num_gap_bytes
        positions = _positions(np.frombuffer(payload[_COUNTS.size : end_of_gaps], np.uint8))
        differences = np.frombuffer(payload[end_of_gaps : end_of_gaps + count], np.uint8).astype(_LARGE_DTYPE)
        differences[differences == _LARGE] = np.frombuffer(payload[end_of_gaps + count :], _LARGE_DTYPE)
        elements[positions] += _undone(differences.astype(elements.dtype))
    except (zlib.error, struct.error, ValueError, IndexError) as error:
        raise DeltaError(f"a frame of {len(frame)} bytes is damaged ({error})") from error


def _elements(piece: memoryview, itemsize: int) -> Numbers:
    elements: Numbers = np.frombuffer(piece, _UNSIGNED[itemsize])
    return elements


def _small_if_near_zero(differences: Numbers) -> Numbers:
    """0, -1, 1, -2, 2 ... -> 0, 1, 2, 3, 4 ...: differences, which wrap around, as numbers without a sign."""
    signed = differences.view(f"<i{differences.itemsize}")
    number: Numbers = ((signed << 1) ^ (signed >> (8 * differences.itemsize - 1))).view(differences.dtype)
    return number


def _undone(numbers: Numbers) -> Numbers:
    """The differences of which `_small_if_near_zero` made these numbers."""
    one = numbers.dtype.type(1)
    differences: Numbers = (numbers >> one) ^ (~(numbers & one) + one)
    return differences


def _gap_bytes(gaps: npt.NDArray[np.int64]) -> bytes:
    """Each gap as bytes that add up to it, of which only the last one is not 255."""
    ends = np.cumsum(gaps // _LARGE + 1)
    content = np.full(ends[-1], _LARGE, np.uint8)
    content[ends - 1] = gaps % _LARGE
    return content.tobytes()


def _positions(gap_bytes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Where the elements are that have these gaps before them."""
    positions: npt.NDArray[np.int64] = np.cumsum(gap_bytes, dtype=np.int64)[gap_bytes != _LARGE]
    positions += np.arange(positions.size)
    return positions


# --- a file -----------------------------------------------------------------------------------------------------------


class DeltaEncoder:
    """Makes the delta of a file while that is written, piece by piece, from the bytes that are meant."""

    def __init__(self, base: Readable, *, itemsize: int, max_bytes: int) -> None:
        """
        Args:
            base: the same file of the version before, unbuffered, at its beginning.
            itemsize: bytes of an element: 1, 2 or 4.
            max_bytes: of the delta; where it needs more, there is none.
        """
        self._base = base
        self._itemsize = itemsize
        self._max_bytes = max_bytes
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        self.given_up = ""
        """Why there is no delta; empty as long as there may be one."""

    def add(self, piece: memoryview) -> None:
        """The next bytes of the new file, whole elements; what goes wrong with the base is no error of the new file."""
        for start in range(0, piece.nbytes, PIECE_BYTES):
            if not self.given_up:
                try:
                    self._add(piece[start : start + PIECE_BYTES])
                except OSError as error:
                    self._give_up(f"the version before cannot be read: {error}")

    def _add(self, new: memoryview) -> None:
        base = self._buffer[: new.nbytes]
        if _fill(self._base, base) < new.nbytes:
            self._give_up("the file of the version before is shorter")
            return
        frame = encode_piece(base, new, itemsize=self._itemsize)
        self._frames += [_FRAME.pack(new.nbytes, len(frame)), frame]
        self._num_bytes += _FRAME.size + len(frame)
        if self._num_bytes > self._max_bytes:
            self._give_up(f"too much has changed for {self._max_bytes:,} bytes")

    def _give_up(self, reason: str) -> None:
        self.given_up = reason
        self._frames.clear()

    def content(self, *, base: FileEntry, result: FileEntry) -> list[bytes]:
        """The delta's bytes once all were added; none if it was given up."""
        if not self.given_up and base.size != result.size:
            self._give_up(f"{result.size:,} bytes do not follow from the {base.size:,} of the version before")
        if self.given_up:
            return []
        header = msgspec.json.encode(DeltaHeader(itemsize=self._itemsize, base=base, result=result))
        return [_MAGIC, _HEADER_LENGTH.pack(len(header)), header, *self._frames]


def read_header(delta: BinaryIO) -> DeltaHeader:
    """What the delta leads from and to; leaves `delta` at its first frame.

    Raises:
        DeltaError: it is none, or damaged.
    """
    if (magic := delta.read(len(_MAGIC))) != _MAGIC:
        raise DeltaError(f"expected {_MAGIC!r} at the beginning of a delta, got {magic!r}")
    (length,) = _HEADER_LENGTH.unpack(_exactly(delta, _HEADER_LENGTH.size))
    if length > _MAX_HEADER_BYTES:
        raise DeltaError(f"expected a header of at most {_MAX_HEADER_BYTES} bytes, got {length}")
    try:
        header = msgspec.json.decode(_exactly(delta, length), type=DeltaHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DeltaError(f"expected a delta's header, got something else ({error})") from error
    if header.itemsize not in _UNSIGNED:
        raise DeltaError(f"expected elements of {sorted(_UNSIGNED)} bytes, got {header.itemsize}")
    return header


def apply_delta(base: Readable, delta: BinaryIO, header: DeltaHeader) -> Iterator[memoryview]:
    """The new file, in pieces that are valid until the next; who writes it compares its digest with `header.result`.

    Args:
        base: unbuffered, at its beginning; or a `PieceFile` of what another delta gives.
        delta: at its first frame, as `read_header` leaves it.

    Raises:
        DeltaError: a frame is damaged or missing, or `base` is too short.
    """
    done = 0
    buffer = memoryview(bytearray(PIECE_BYTES))
    while done < header.result.size:
        covered, length = _FRAME.unpack(_exactly(delta, _FRAME.size))
        if not 0 < covered <= min(PIECE_BYTES, header.result.size - done) or covered % header.itemsize:
            raise DeltaError(f"a frame covers {covered} bytes from byte {done} on, of a file of {header.result.size}")
        piece = buffer[:covered]
        if (size := _fill(base, piece)) < covered:
            raise DeltaError(f"expected a base of {header.base.size} bytes, got {done + size}")
        apply_piece(piece, _exactly(delta, length), itemsize=header.itemsize)
        yield piece
        done += covered
    if delta.read(1):
        raise DeltaError(f"expected the end of the delta after {done} bytes of its result, got more")


class PieceFile:
    """Pieces that come one after the other, read as a file: the base of a delta may be what another one gives."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        """
        Args:
            pieces: each is valid until the next.
        """
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of `buffer`; returns how many bytes, 0 at the end."""
        while not self._rest.nbytes:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        size = min(buffer.nbytes, self._rest.nbytes)
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _fill(file: Readable, piece: memoryview) -> int:
    """Reads until `piece` is full or the file ends; returns how much came."""
    done = 0
    while done < piece.nbytes and (size := file.readinto(piece[done:])):
        done += size
    return done


def _exactly(delta: BinaryIO, size: int) -> bytes:
    if len(data := delta.read(size)) < size:
        raise DeltaError(f"the delta ends {size - len(data)} bytes too early")
    return data
