"""Strict YAML: what each scalar becomes, and where each key stands."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.errors import ConfigError
from corral.experiments.loading.yaml_loader import parse_value, parse_yaml


def _value(text: str) -> Any:
    return parse_value(text, place="test")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24:00:00", "24:00:00"),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-3.", -3.0),
        ("1_000", "1_000"),
        ("0x10", 16),
        ("0o17", 15),
        ("017", 17),
        ("+4", 4),
        ("2024-01-31", "2024-01-31"),
        ("null", None),
        ("~", None),
        ("", None),
        ("none", "none"),
        ("'12'", "12"),
        ('"true"', "true"),
        ("'~'", "~"),
        ("=", "="),
        ("a:b", "a:b"),
        ("[1, two, 3.0]", [1, "two", 3.0]),
        ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    read = _value(text)
    assert read == value and type(read) is type(value)


def test_lines_of_keys_and_items_are_known() -> None:
    text = "a: 1\n\nb:\n  c: 2\n  d:\n    - x\n    - y: 1\ne: {f: 3,\n  g: 4}\n"
    data, places = parse_yaml(text.encode(), file=Path("x.yaml"))
    lines = {path: place.line for path, place in places.items()}
    assert data == {"a": 1, "b": {"c": 2, "d": ["x", {"y": 1}]}, "e": {"f": 3, "g": 4}}
    assert lines[("a",)] == 1
    assert lines[("b",)] == 3
    assert lines[("b", "c")] == 4
    assert lines[("b", "d", 0)] == 6
    assert lines[("b", "d", 1, "y")] == 7
    assert lines[("e", "f")] == 8
    assert lines[("e", "g")] == 9


def test_all_duplicate_keys_are_reported_with_both_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(b"a: 1\nb: {c: 1, c: 2}\na: 2\n", file=Path("x.yaml"))
    assert "'c' is given twice, on lines 2 and 2" in str(caught.value)
    assert "'a' is given twice, on lines 1 and 3" in str(caught.value)


def test_keys_that_look_like_numbers_stay_text() -> None:
    data, _ = parse_yaml(b"1: a\nyes: b\nnull: c\n", file=Path("x.yaml"))
    assert data == {"1": "a", "yes": "b", "null": "c"}


def test_folded_text_is_one_line() -> None:
    data, _ = parse_yaml(b"a: >-\n  one\n  two\n", file=Path("x.yaml"))
    assert data == {"a": "one two"}


def test_byte_order_mark_is_no_part_of_the_first_key() -> None:
    data, _ = parse_yaml(b"\xef\xbb\xbfa: 1\n", file=Path("x.yaml"))
    assert data == {"a": 1}


@pytest.mark.parametrize("character", ["\\x00", "\\e", "\\n", "\\t", "\\L", "\\P", "\\N", "\\x9b"])
def test_control_characters_are_refused_however_they_are_written(character: str) -> None:
    with pytest.raises(ConfigError, match="control character"):
        parse_yaml(f'a: "x{character}y"\n'.encode(), file=Path("x.yaml"))


_KEYS = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=8)
_TEXTS = st.text(st.characters(categories=("L", "N", "P", "S")), max_size=12)
_LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS
)
_TREES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4), max_leaves=15
)


@given(st.dictionaries(_KEYS, _TREES, max_size=4))
def test_what_is_written_is_read_back(data: dict[str, Any]) -> None:
    read, _ = parse_yaml(_dump(data).encode(), file=Path("x.yaml"))
    assert read == data


def _dump(value: Any) -> str:
    """YAML in flow style with all text in single quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_dump(key)}: {_dump(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_dump(item) for item in value) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def test_what_stands_without_quotes_is_known_as_it_is_written() -> None:
    _, places = parse_yaml(b"a: 0123\nb: {c: 1e5, d: [007, '08']}\n", file=Path("x.yaml"))
    written = {path: place.written for path, place in places.items() if place.written}
    assert written == {("a",): "0123", ("b", "c"): "1e5", ("b", "d", 0): "007"}
