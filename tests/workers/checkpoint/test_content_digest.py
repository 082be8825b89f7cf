"""Digests are BLAKE3, whatever the pieces in which the bytes come."""

import struct

from hypothesis import example, given, settings
from hypothesis import strategies as st

from corral.workers.checkpoint.durable_file import ContentDigest, digest_of, mismatch

INITIAL = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)  # of a block's words, from one round to the next
QUARTERS = (
    ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    (
        (0, 5, 10, 15),
        (1, 6, 11, 12),
        (2, 7, 8, 13),
        (3, 4, 9, 14),
    ),
)
CHUNK, BLOCK = 1024, 64
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8


def compressed(chain: tuple[int, ...], block: bytes, counter: int, flags: int) -> tuple[int, ...]:
    """BLAKE3's specification, section 2.2: eight words of 32 bits."""
    words = struct.unpack("<16I", block.ljust(BLOCK, b"\0"))
    v = [*chain, *INITIAL[:4], counter & 0xFFFFFFFF, counter >> 32, len(block), flags]
    for _ in range(7):
        pairs = iter(words)
        for a, b, c, d in (place for half in QUARTERS for place in half):
            for word, first, second in ((next(pairs), 16, 12), (next(pairs), 8, 7)):
                v[a] = (v[a] + v[b] + word) & 0xFFFFFFFF
                v[d] = rotated(v[d] ^ v[a], first)
                v[c] = (v[c] + v[d]) & 0xFFFFFFFF
                v[b] = rotated(v[b] ^ v[c], second)
        words = tuple(words[place] for place in ORDER)
    return tuple(low ^ high for low, high in zip(v[:8], v[8:], strict=True))


def rotated(word: int, places: int) -> int:
    return (word >> places | word << (32 - places)) & 0xFFFFFFFF


def chained(content: bytes, counter: int, flags: int) -> tuple[int, ...]:
    """Of one chunk, or of a tree whose left side is the largest power of two of chunks that leaves something."""
    if len(content) <= CHUNK:
        chain = INITIAL
        blocks = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)] or [b""]
        for number, block in enumerate(blocks):
            is_last = number == len(blocks) - 1
            chain = compressed(
                chain, block, counter, CHUNK_START * (number == 0) | (CHUNK_END | flags if is_last else 0)
            )
        return chain
    num_left = 1 << ((len(content) - 1) // CHUNK).bit_length() - 1
    left = chained(content[: num_left * CHUNK], counter, 0)
    right = chained(content[num_left * CHUNK :], counter + num_left, 0)
    return compressed(INITIAL, struct.pack("<16I", *left, *right), 0, PARENT | flags)


def blake3_slowly(content: bytes) -> str:
    return struct.pack("<8I", *chained(content, 0, ROOT)).hex()


def test_the_slow_loop_knows_the_digests_that_are_known_elsewhere() -> None:
    assert blake3_slowly(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert blake3_slowly(b"abc") == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"


@settings(max_examples=20, deadline=None)
@given(size=st.integers(0, 12 * CHUNK), cuts=st.lists(st.integers(0, 12 * CHUNK), max_size=4))
@example(size=CHUNK, cuts=[])
@example(size=CHUNK + 1, cuts=[1])
@example(size=8 * CHUNK, cuts=[8 * CHUNK - 1])
def test_pieces_have_the_digest_of_the_whole(size: int, cuts: list[int]) -> None:
    content = bytes(number * number % 251 for number in range(size))
    digest, begin = ContentDigest(), 0
    for end in [*sorted(cuts), size]:
        digest.update(memoryview(content)[begin : max(begin, end)])
        begin = max(begin, end)
    assert digest.hexdigest() == digest_of(content) == blake3_slowly(content)


def test_a_message_names_the_digest_that_differs() -> None:
    assert mismatch("a", "b") == "expected BLAKE3 a, got b"
