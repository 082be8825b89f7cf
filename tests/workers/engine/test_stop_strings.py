"""A stop string is seen with the token that completes it, however the text is cut into tokens."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.engine.requests import StopStrings

PIECES = [b"a", b"b", b"ab", b" ", b"  a", b"\n", b"\xc3", b"\xa9", "é".encode(), b"b\xe2\x82", b"\xac", b"ba\n a"]


def decode(token_ids: Sequence[int]) -> str:
    """As byte-level tokenizers do: a character that is not whole shows as a replacement character."""
    return b"".join(PIECES[token_id] for token_id in token_ids).decode(errors="replace")


strings = st.lists(st.text("ab \né€", min_size=1, max_size=6), min_size=1, max_size=3)


@given(strings=strings, token_ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=40))
def test_an_answer_ends_where_its_whole_text_first_has_a_stop_string(strings: list[str], token_ids: list[int]) -> None:
    stop = StopStrings(strings, decode)
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[:end])
        assert (stop.matched(token_ids[:end]) is not None) == any(string in text for string in strings)
        if any(string in text for string in strings):
            break


def test_the_string_that_is_named_first_is_the_one_that_matched() -> None:
    assert StopStrings(["b", "ab"], decode).matched([2]) == "b"
    assert StopStrings(["ab", "b"], decode).matched([2]) == "ab"
    assert StopStrings(["ab", "b"], decode).matched([4, 0]) is None
