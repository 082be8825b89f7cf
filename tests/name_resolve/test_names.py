"""Which names there are, and why others are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.name_resolve.base import check_name, check_prefix

segments = st.text(alphabet="ab1.:-_", min_size=1, max_size=3).filter(lambda segment: segment not in (".", ".."))
names = st.lists(segments, min_size=1, max_size=3).map("/".join)


@given(names)
def test_names_of_the_alphabet_are_accepted_unchanged(name: str) -> None:
    assert check_name(name) == name


@given(st.text(max_size=6))
def test_whatever_is_accepted_is_harmless_in_paths_patterns_and_configuration(text: str) -> None:
    try:
        check_name(text)
    except ValueError:
        return
    assert not set(text) & set("*?[]^\\~%&#'\"` \n\r\t\0$")
    assert not any(segment in ("", ".", "..") for segment in text.split("/"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a//b", "has an empty segment"),
        ("a/", "has an empty segment"),
        ("/a", "has an empty segment"),
        ("a/../b", "is a path"),
        ("a/b*", r"has the segment 'b\*'; names are segments of \[A-Za-z0-9._:-\]\+"),
        ("x" * 241, "has 241 characters; names have at most 240"),
    ],
)
def test_a_refusal_says_which_rule_was_broken(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_name(name)


def test_a_prefix_must_end_where_no_other_prefix_can_go_on() -> None:
    assert check_prefix("corral/12/") == "corral/12/"
    with pytest.raises(ValueError, match="must end in '/'"):
        check_prefix("corral/1")
