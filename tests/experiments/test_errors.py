"""The way out of an error text is what follows its last semicolon, and no part of a value that the text quotes."""

from hypothesis import example, given
from hypothesis import strategies as st

from corral.experiments.errors import split_remedy


@given(st.text(st.sampled_from("ab'\"\\; \n"), max_size=12))
@example("a; b")
@example("it's; x")
@example('say "it\'s"; x')
def test_a_quoted_value_is_whole_with_and_without_a_way_out(value: str) -> None:
    rule = f"the reward's key {value!r} is no word"
    assert split_remedy(rule) == (rule, "")
    assert split_remedy(f"{rule}; take another one's") == (rule, "take another one's")
    assert split_remedy(f"no such key; did you mean {value!r}?") == ("no such key", f"did you mean {value!r}?")
