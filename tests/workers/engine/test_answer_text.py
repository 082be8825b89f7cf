"""The text of an answer: all of it but what has stopped it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from corral.workers.engine.requests import AbortFinish, LengthFinish, StopFinish, StopStrings, answer_text, text_decoder
from corral.workers.engine.sampling import SamplingParams

PIECES = [b"a", b"b", b"ab", b" ", b"\n", b"\xc3", b"\xa9", "\u00e9".encode(), b"b\xe2\x82", b"\xac", b"ba\n a"]
END = len(PIECES)

answers = st.lists(st.integers(0, len(PIECES) - 1), max_size=30)


def decode(token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """As byte-level tokenizers do; the end of an answer is a special token."""
    pieces = [*PIECES, b"" if skip_special_tokens else b"<end>"]
    return b"".join(pieces[token_id] for token_id in token_ids).decode(errors="replace")


@given(token_ids=answers)
def test_what_nothing_has_stopped_is_there_to_its_last_token(token_ids: list[int]) -> None:
    whole = answer_text(token_ids, LengthFinish(len(token_ids)), SamplingParams(), decode)
    assert whole == decode(token_ids) == answer_text(token_ids, AbortFinish(), SamplingParams(), decode)


@given(token_ids=answers, skips=st.booleans())
def test_a_stop_token_is_left_out_unless_it_is_to_stay(token_ids: list[int], skips: bool) -> None:
    ids = [*token_ids, END]
    assert answer_text(ids, StopFinish(END), SamplingParams(skip_special_tokens=skips), decode) == decode(token_ids)
    kept = answer_text(ids, StopFinish(END), SamplingParams(skip_special_tokens=skips, no_stop_trim=True), decode)
    assert kept == decode(ids, skip_special_tokens=skips)


def test_a_text_ends_before_its_stop_string_and_without_what_the_last_token_has_behind_it() -> None:
    ids = [0, 3, 10]  # "a ba\n a"
    assert answer_text(ids, StopFinish("a\n"), SamplingParams(), decode) == "a b"
    assert answer_text(ids, StopFinish("a\n"), SamplingParams(no_stop_trim=True), decode) == "a ba\n"
    assert (
        answer_text([0, END], StopFinish("<end>"), SamplingParams(), decode) == "a"
    )  # it is skipped, and so not found


def test_the_tokenizer_of_a_model_directory_decodes_with_and_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    by_tokenizer = text_decoder(tmp_path)
    assert by_tokenizer([1, 0, 2]) == "twoone<end>"
    assert by_tokenizer([1, 0, 2], skip_special_tokens=True) == "twoone"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot use the tokenizer"):
        text_decoder(tmp_path)


# --- stop strings ---------------------------------------------------------------------------------------------------

strings = st.lists(st.text("ab \né€", min_size=1, max_size=6), min_size=1, max_size=3)


@given(strings=strings, token_ids=answers)
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
