"""Calls come back as the template has written them, for the forms of published templates."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from corral.experiments.prompts.chat import ChatRenderer
from tests.chat_models import write_template_model
from tests.experiments.prompts.template_forms import FORMS, template_of

RENDERERS: dict[str, ChatRenderer] = {}
ASKED = {"role": "user", "content": "q"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/short"}]},
        "count": {"type": ["integer", "null"]},
        "share": {"type": "number", "nullable": True},
        "deep": {"type": "boolean"},
        "more": {"type": "object"},
        "list": {"type": "array", "items": {}},
    },
    "$defs": {"short": {"type": "string", "maxLength": 3}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}}
    for name in ("look", "get_it", "ns-find-2")
]
# What ends a value in one of the forms, with what follows it: no reader can tell that from the end.
ENDS = ("</parameter>", "</arg_value>", "'", "<|q|>")


@pytest.fixture(scope="module", autouse=True)
def renderers(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, form in FORMS.items():
        directory = write_template_model(tmp_path_factory.mktemp("model"), template_of(form), ends=["<|im_end|>"])
        RENDERERS[name] = ChatRenderer.of_model(directory)


def written(name: str, calls: list[tuple[str, dict[str, Any]]], *, said: str = "") -> str:
    """What the template makes of an answer, behind the prompt and without its end."""
    template, form = RENDERERS[name].template, FORMS[name]
    each = [
        {"id": form.ids.format(name=tool, place=at), "type": "function", "function": {"name": tool, "arguments": given}}
        for at, (tool, given) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": said, "tool_calls": each}
    text = template.render([ASKED, answer], tools=TOOLS, asks=False)
    return text.removeprefix(template.render([ASKED], tools=TOOLS)).removesuffix(f"{form.end}\n")


def read(name: str, text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    renderer = RENDERERS[name]
    message = renderer.parse(renderer.tokenizer.encode(text).ids, stopped=False, tools=TOOLS)
    return message.content, [(call.name, dict(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize("name", FORMS)
def test_the_call_of_a_form_is_written_and_read_as_it_stands_there(name: str) -> None:
    calls = [("look", {"city": "Rome", "deep": True})]
    assert written(name, calls) == FORMS[name].written
    assert read(name, FORMS[name].written) == ("", calls)


_TEXT = st.one_of(
    st.text(st.sampled_from("ab \n\"'\\\\<>{}[](),=:|/é\U0001f600"), max_size=12),
    st.sampled_from(
        [
            "",
            "\n",
            "a\nb\n",
            "\n\n  a\t",
            "12",
            "1e5",
            "true",
            "False",
            "None",
            "null",
            "[1]",
            '{"a": 1}',
            '"a"',
            "a, b=3)",
        ]
    ),
    st.sampled_from(["<tool_call>", "</tool_call>", "<parameter=x>", "[CALLS]", "<|/call|>", "<invoke>", "<b>x</b>"]),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.sampled_from(["x", "", "1", "true"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b_c"]), inner, max_size=2),
    max_leaves=5,
)
_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": _TEXT,
        "note": _TEXT,
        "count": st.none() | st.integers(),
        "share": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "deep": st.booleans(),
        "more": st.dictionaries(st.sampled_from(["a", "b_c"]), _JSON, max_size=2),
        "list": st.lists(_JSON, max_size=3),
    },
)
_CALLS = st.lists(st.tuples(st.sampled_from(["look", "get_it", "ns-find-2"]), _ARGUMENTS), min_size=1, max_size=2)


@pytest.mark.parametrize("name", FORMS)
@given(calls=_CALLS, said=st.sampled_from(["", "Let me see.", "a, b;"]))
@settings(max_examples=40, deadline=None)
def test_what_the_template_writes_is_read_back(name: str, calls: list[tuple[str, dict[str, Any]]], said: str) -> None:
    if name == "name in the head":  # which has room for one, and for nothing beside it
        calls, said = calls[:1], ""
    for text in texts_in(calls):
        assume(name not in ("a program's arguments", "quoted with a token") or not any(end in text for end in ENDS))
    assert read(name, written(name, calls, said=said)) == (said, calls)


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from texts_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_in(one)


@pytest.mark.parametrize("name", ["each argument on lines, as Python", "each argument, as JSON", "keys and values"])
def test_the_mark_that_ends_a_value_may_stand_in_it(name: str) -> None:
    for text in ("a </parameter> b", "</arg_value>", "<b></parameter></b>"):
        calls = [("look", {"city": text, "deep": False})]
        assert read(name, written(name, calls)) == ("", calls)


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_is_cut_is_what_was_said(name: str) -> None:
    whole = written(name, [("look", {"count": 1})])
    cut = whole[: whole.rindex("1")]
    assert read(name, cut) == (cut, [])


def test_the_id_of_a_call_that_the_template_writes_in_place_of_a_name_is_the_models() -> None:
    renderer = RENDERERS["id, then json"]
    text = written("id, then json", [("look", {"city": "Rome"}), ("get_it", {})])
    message = renderer.parse(renderer.tokenizer.encode(text).ids, stopped=False, tools=TOOLS)
    assert [(call.name, call.id) for call in message.tool_calls] == [
        ("look", "functions.look:0"),
        ("get_it", "functions.get_it:1"),
    ]


def test_an_answer_ends_with_the_token_that_ends_its_call() -> None:
    renderer = RENDERERS["name in the head"]
    assert [renderer.tokenizer.id_to_token(end) for end in renderer.stop_token_ids] == ["<|im_end|>", "<|call|>"]


def test_calls_that_are_messages_of_their_own_have_a_form_though_each_says_its_name_twice(tmp_path: Path) -> None:
    form = FORMS["name before the json"]
    between = "{{ '<|im_end|>\\n<|im_start|>assistant\\n' if not loop.last }}{% endfor %}"
    apart = replace(form, calls=form.calls.replace("{% endfor %}", between))
    directory = write_template_model(tmp_path, template_of(apart), ends=["<|im_end|>"])
    assert ChatRenderer.of_model(directory).tool_calls == RENDERERS["name before the json"].tool_calls


def test_a_template_for_requests_with_tools_says_how_calls_are_written(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role + '\\n' + m.content }}<|im_end|>\n{% endfor %}"
    plain += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    directory = write_template_model(tmp_path, plain, ends=["<|im_end|>"])
    assert ChatRenderer.of_model(directory).tool_calls is None
    (directory / "additional_chat_templates").mkdir()
    source = template_of(FORMS["json between marks"])
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(source)
    assert ChatRenderer.of_model(directory).tool_calls == RENDERERS["json between marks"].tool_calls
