"""Calls in the text of answers, in the forms in which templates of the field write them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.prompts.spelled_calls import spelled_form_in
from corral.experiments.prompts.tool_calls import PROBED_ARGUMENTS, PROBED_NAME, ToolCall, json_form_in

Write = Callable[[int, str, dict[str, Any]], str]
"""(place among the calls of an answer, name, arguments) -> text"""


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def each(begin: str, middle: str, end: str) -> Callable[[dict[str, Any]], str]:
    return lambda arguments: "".join(f"{begin}{key}{middle}{text_of(value)}{end}" for key, value in arguments.items())


FORMS: dict[str, tuple[Write, str, str]] = {  # and what stands before and behind all calls
    "hermes": (lambda _, name, args: f"<call>\n{json.dumps({'name': name, 'arguments': args})}\n</call>", "", ""),
    "list": (lambda _, name, args: f"[CALLS] [{json.dumps({'name': name, 'arguments': args})}]", "", ""),
    "bare": (lambda _, name, args: json.dumps({"name": name, "parameters": args}), "", ""),
    "tag": (lambda _, name, args: f"<function={name}>{json.dumps(args)}</function>", "", ""),
    "brackets": (lambda _, name, args: f"[CALLS]{name}[ID]12345678{_}[ARGS]{json.dumps(args)}", "", ""),
    "numbered": (
        lambda at, name, args: f"<|call|>f.{name}:{at}<|args|>{json.dumps(args)}<|end|>",
        "<|all|>",
        "<|/all|>",
    ),
    "each": (
        lambda _, name, args: (
            f"<function={name}>\n" + each("<parameter=", ">\n", "\n</parameter>\n")(args) + "</function>"
        ),
        "<call>\n",
        "\n</call>",
    ),
    "quoted": (
        lambda _, name, args: f'<do name="{name}">\n' + each('<arg name="', '">', "</arg>\n")(args) + "</do>",
        "<calls>\n",
        "\n</calls>",
    ),
    "keys": (
        lambda _, name, args: f"<call>{name}\n" + each("<key>", "</key>\n<value>", "</value>\n")(args) + "</call>",
        "",
        "",
    ),
}
_KEYS = st.sampled_from(["city", "count", "deep"])
_VALUES = st.one_of(
    st.integers(),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
    st.just({"a": [None]}),
    st.just('two\nlines { } "'),
)
_CALLS = st.lists(
    st.tuples(st.sampled_from(["look", "get_it", "ns.find-2"]), st.dictionaries(_KEYS, _VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"text": {"type": "string"}}}}}
    for name in ("look", "get_it", "ns.find-2")
]


def form_of(name: str) -> Any:
    write, begin, end = FORMS[name]
    probe = begin + write(0, PROBED_NAME, PROBED_ARGUMENTS) + end
    return json_form_in(probe) or spelled_form_in(probe)


@pytest.mark.parametrize("name", FORMS)
@given(calls=_CALLS, said=st.sampled_from(["", "Let me see.\nFirst: "]))
def test_calls_are_found_in_the_form_of_one_that_is_known(
    name: str, calls: list[tuple[str, dict[str, Any]]], said: str
) -> None:
    write, begin, end = FORMS[name]
    said = "" if name == "bare" else said
    text = said + begin + "\n".join(write(at, *call) for at, call in enumerate(calls)) + end
    assert form_of(name).find(text, tools=TOOLS) == (said.strip(), [ToolCall(*call) for call in calls])


def test_an_argument_that_is_to_be_text_is_text_whatever_it_looks_like() -> None:
    for name in ("each", "quoted", "keys"):
        text = FORMS[name][0](0, "look", {"text": "12", "count": 12})
        assert form_of(name).find(text, tools=TOOLS)[1] == [ToolCall("look", {"text": "12", "count": 12})]


@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("list", "bare", "brackets")])
def test_a_call_that_was_cut_is_text(name: str) -> None:
    write, begin, end = FORMS[name]
    whole = begin + write(0, "look", {"count": 1}) + end
    cut = whole[: whole.rindex("1") + 1]
    assert form_of(name).find(cut, tools=TOOLS) == (cut, [])
    assert form_of(name).find("Nothing.", tools=TOOLS) == ("Nothing.", [])


@pytest.mark.parametrize(
    "text", ["", "no call", "probed_function", "<f>probed_function</f>", 'probed_function{"a": 1}']
)
def test_a_text_without_marks_has_no_form(text: str) -> None:
    assert json_form_in(text) is spelled_form_in(text) is None
