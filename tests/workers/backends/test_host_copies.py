"""Copies in host memory take what is copied, and hardly more, whatever torch rounds up."""

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.backends.host_copies import Blocks


@given(st.lists(st.integers(1, 3 * 2**20), min_size=1, max_size=60))
def test_pieces_of_blocks_have_no_byte_in_common_and_blocks_are_powers_of_two(sizes: list[int]) -> None:
    blocks = Blocks(is_pinned=False)
    pieces = [blocks.take(size) for size in sizes]
    assert [piece.numel() for piece in pieces] == sizes
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    storages = {piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in pieces}
    assert all(size.bit_count() == 1 for size in storages.values())  # which torch rounds up to themselves
    assert sum(storages.values()) == blocks.total_bytes


def test_a_share_of_a_7b_model_takes_a_tenth_more_than_itself_and_not_nine_tenths() -> None:
    """Its rows on one of eight ranks with two moments in float32, scaled down by 64 so that they fit in here."""
    hidden, inner, keys, vocabulary = 3584, 18944, 512, 152064
    layer = [hidden, hidden, keys * hidden, keys * hidden, hidden**2, hidden**2, *([hidden * inner] * 3)]
    numbers = [vocabulary * hidden, *(layer * 28), vocabulary * hidden, hidden]
    sizes = [max(4, 4 * number // 8 // 64) for number in numbers for _ in range(3)]
    blocks = Blocks(is_pinned=False, largest=2**28 // 64)
    for size in sizes:
        blocks.take(size)
    one_by_one = sum(1 << (size - 1).bit_length() for size in sizes)
    assert one_by_one > 1.9 * sum(sizes)
    assert blocks.total_bytes < 1.1 * sum(sizes)
