"""A delta gives the new file bit for bit, or says what is wrong; and it is as small as what has changed."""

import io
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.file_delta import (
    DeltaEncoder,
    DeltaError,
    PieceFile,
    Readable,
    apply_delta,
    apply_piece,
    encode_piece,
    read_header,
)

ITEM_SIZES = st.sampled_from([1, 2, 4])
NAN_PAYLOADS = b"\x81\x7f\xc1\xff\x01\x00\x00\x80"  # bfloat16: two NaNs, the smallest number, minus zero


@st.composite
def pieces(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """An element's size, and two pieces: any change pattern, from none to all."""
    itemsize = draw(ITEM_SIZES)
    num_elements = draw(st.integers(1, 1500))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, num_elements * itemsize, dtype=np.uint8)
    new = base.copy()
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.5, 1.0]))
    if draw(st.booleans()):
        changed = np.repeat(rng.random(num_elements) < share, itemsize)
        new[changed] = rng.integers(0, 256, changed.sum(), dtype=np.uint8)
    else:  # to a neighbouring number, as training does
        view = new.view(f"<u{itemsize}")
        steps = rng.choice(np.array([-2, -1, 1, 2]), num_elements) * (rng.random(num_elements) < share)
        view += steps.astype(view.dtype)
    return itemsize, base.tobytes(), new.tobytes()


@settings(max_examples=150, deadline=None)
@given(pieces())
@example((2, bytes(8), NAN_PAYLOADS))
@example((2, NAN_PAYLOADS, bytes(8)))
@example((2, b"\xff\xff" * 300, b"\x00\x00" * 300))
@example((4, b"\x00" * 4000, b"\x00" * 3996 + b"\x00\x00\x00\x80"))  # the largest difference, after a large gap
def test_a_piece_is_what_it_was_bit_for_bit(of: tuple[int, bytes, bytes]) -> None:
    itemsize, base, new = of
    frame = encode_piece(memoryview(base), memoryview(new), itemsize=itemsize)
    piece = bytearray(base)
    apply_piece(memoryview(piece), frame, itemsize=itemsize)
    assert piece == new
    assert (not frame) == (base == new)


@settings(max_examples=150, deadline=None)
@given(pieces(), st.data())
def test_a_frame_that_is_torn_or_has_another_byte_is_refused_or_gives_something_else(
    of: tuple[int, bytes, bytes], data: st.DataObject
) -> None:
    itemsize, base, new = of
    frame = bytearray(encode_piece(memoryview(base), memoryview(new), itemsize=itemsize))
    assume(frame)
    where = data.draw(st.integers(0, len(frame) - 1))
    if data.draw(st.booleans()):
        frame = frame[:where]
    else:
        frame[where] ^= data.draw(st.integers(1, 255))
    piece = bytearray(base)
    try:
        apply_piece(memoryview(piece), frame, itemsize=itemsize)
    except DeltaError as error:
        assert "damaged" in str(error)
    assert len(piece) == len(base)  # whose digest shows what it is


def test_pieces_that_are_not_alike_are_refused() -> None:
    with pytest.raises(ValueError, match="pieces of 4 and 6 bytes"):
        encode_piece(memoryview(bytes(4)), memoryview(bytes(6)), itemsize=2)
    with pytest.raises(ValueError, match="elements of 4 bytes"):
        encode_piece(memoryview(bytes(6)), memoryview(bytes(6)), itemsize=4)


def entropy(share: float) -> float:
    return float(-(share * np.log2(share) + (1 - share) * np.log2(1 - share)))


@pytest.mark.parametrize("share", [0.01, 0.03])
def test_a_delta_is_nearly_as_small_as_can_be(share: float) -> None:
    num_elements = 2**20
    base, new = changed_bfloat16(num_elements, share=share)
    frame = encode_piece(memoryview(base), memoryview(new), itemsize=2)
    bound_bits = num_elements * (entropy(share) + share)  # where they are, and up or down by one
    assert bound_bits < 8 * len(frame) < 1.1 * bound_bits
    assert len(frame) < 0.02 * len(new)


def changed_bfloat16(num_elements: int, *, share: float) -> tuple[bytes, bytes]:
    """Weights of a standard deviation of 0.02, of which a share goes up or down by one step."""
    rng = np.random.default_rng(0)
    base = (rng.normal(0.0, 0.02, num_elements).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    steps = rng.choice(np.array([-1, 1], dtype=np.int16), num_elements) * (rng.random(num_elements) < share)
    return base.tobytes(), (base + steps.astype(np.uint16)).tobytes()


# --- files ------------------------------------------------------------------------------------------------------------


def entry(content: bytes) -> FileEntry:
    return FileEntry(size=len(content), digest=blake3(content).hexdigest())


def encode(base: bytes, new: bytes, *, piece_bytes: int = 2**20, itemsize: int = 2, max_bytes: int = 2**30) -> bytes:
    encoder = DeltaEncoder(io.BytesIO(base), itemsize=itemsize, max_bytes=max_bytes)
    for start in range(0, len(new), piece_bytes):
        encoder.add(memoryview(new)[start : start + piece_bytes])
    return b"".join(encoder.content(base=entry(base), result=entry(new)))


def apply(base: bytes, delta: bytes) -> bytes:
    file = io.BytesIO(delta)
    header = read_header(file)
    assert header.base == entry(base)
    return b"".join(map(bytes, apply_delta(io.BytesIO(base), file, header)))


@settings(max_examples=50, deadline=None)
@given(pieces(), st.integers(1, 400))
def test_a_file_in_any_pieces_is_what_it_was(of: tuple[int, bytes, bytes], num_elements: int) -> None:
    itemsize, base, new = of
    delta = encode(base, new, piece_bytes=num_elements * itemsize, itemsize=itemsize)
    assert apply(base, delta) == new


@settings(max_examples=50, deadline=None)
@given(pieces(), st.lists(st.integers(1, 400), min_size=2, max_size=4), st.integers(0, 2**32))
def test_what_one_delta_gives_is_the_base_of_the_next_in_whatever_pieces(
    of: tuple[int, bytes, bytes], num_elements: list[int], seed: int
) -> None:
    itemsize, base, new = of
    source: Readable = io.BytesIO(base)
    rng = np.random.default_rng(seed)
    for number in num_elements:
        delta = io.BytesIO(encode(base, new, piece_bytes=number * itemsize, itemsize=itemsize))
        header = read_header(delta)
        source = PieceFile(apply_delta(source, delta, header))
        base, new = new, rng.permutation(np.frombuffer(new, np.uint8)).tobytes()
    content = bytearray(len(base) + 1)
    view, done = memoryview(content), 0
    while size := source.readinto(view[done : done + int(rng.integers(1, 500))]):
        done += size
    assert bytes(content[:done]) == base


def test_a_file_larger_than_what_is_held_at_a_time_is_what_it_was() -> None:
    base, new = changed_bfloat16(5 * 2**20, share=0.001)
    delta = encode(base, new, piece_bytes=len(new))
    assert apply(base, delta) == new and len(delta) < 0.003 * len(new)
    assert len(encode(new, new, piece_bytes=len(new))) < 400


@pytest.mark.parametrize(
    ("num_base", "max_bytes", "says"),
    [
        (10_001, 2**30, "20,000 bytes do not follow from the 20,002"),
        (9_999, 2**30, "the version before is shorter"),
        (10_000, 200, "too much has changed for 200 bytes"),
    ],
)
def test_there_is_no_delta_where_it_would_not_pay(num_base: int, max_bytes: int, says: str) -> None:
    base, new = (content[:20_000] for content in changed_bfloat16(10_001, share=0.03))
    base = (base + bytes(2))[: 2 * num_base]
    encoder = DeltaEncoder(io.BytesIO(base), itemsize=2, max_bytes=max_bytes)
    encoder.add(memoryview(new))
    assert encoder.content(base=entry(base), result=entry(new)) == []
    assert says in encoder.given_up


def test_a_base_that_cannot_be_read_costs_the_delta_and_not_the_file() -> None:
    class LostFile(io.BytesIO):
        def readinto(self, buffer: object) -> int:
            raise OSError("Stale file handle")

    encoder = DeltaEncoder(LostFile(), itemsize=2, max_bytes=100)
    encoder.add(memoryview(bytes(8)))
    encoder.add(memoryview(bytes(8)))
    assert "Stale file handle" in encoder.given_up
    assert encoder.content(base=entry(bytes(16)), result=entry(bytes(16))) == []


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_torn_or_garbled_delta_never_gives_another_file_of_that_digest(data: st.DataObject) -> None:
    base, new = changed_bfloat16(2_000, share=0.03)
    delta = bytearray(encode(base, new, piece_bytes=1_000))
    where = data.draw(st.integers(0, len(delta) - 1))
    kind = data.draw(st.sampled_from(["torn", "garbled", "longer"]))
    if kind == "torn":
        delta = delta[:where]
    elif kind == "garbled":
        delta[where] ^= data.draw(st.integers(1, 255))
    else:
        delta += bytes(1 + where)
    file = io.BytesIO(delta)
    try:
        header = read_header(file)
        built = b"".join(map(bytes, apply_delta(io.BytesIO(base), file, header)))
    except DeltaError as error:
        assert str(error)
        return
    assert kind == "garbled" and (built == new or entry(built) != header.result)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "expected b'corral delta"),
        (b"corral delta 3\n\xff\xff\xff\xff", "header of at most"),
        (b"corral delta 3\n\x02\x00\x00\x00[]", "expected a delta's header"),
        (b"corral delta 3\n\x02\x00", "ends 2 bytes too early"),
    ],
)
def test_what_is_no_delta_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(DeltaError, match=says):
        read_header(io.BytesIO(content))


def test_a_base_that_is_too_short_is_named(tmp_path: Path) -> None:
    base, new = changed_bfloat16(2_000, share=0.03)
    file = io.BytesIO(encode(base, new))
    with pytest.raises(DeltaError, match="expected a base of 4000 bytes, got 3000"):
        list(apply_delta(io.BytesIO(base[:3000]), file, read_header(file)))
