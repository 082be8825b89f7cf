"""Tool calls whose name stands between marks of the template's, and whose arguments are JSON or marked one by one.

    <function=add>{"a": 1}</function>          [TOOL_CALLS]add[ARGS]{"a": 1}          name, then JSON
    <tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>      name, then each
    <tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>
    <|calls|>[add(a=1, b='x')]<|end|>      <|call>add{a:1,b:<|"|>x<|"|>}<call|>      name, then a list in brackets

Which marks these are shows in a call that is known. Spaces and line breaks between them may be any; those of a value
are its own, but for those that the template puts around each.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from corral.experiments.prompts.messages import ToolSchema
from corral.experiments.prompts.tool_calls import (
    PROBED_ARGUMENTS,
    PROBED_NAME,
    PROBED_NUMBER,
    ToolCall,
    behind,
    find_marked,
    match_at,
    spaced,
)

_MOST_BRACKETS = 64  # of a value as Python writes it; each that may close it is tried
_NAME = r"[^\s<>\[\](){}\"'|=]+"
_MARKS = re.compile(r"<[^<>]+>|\[[^\[\]]+\]|[^\s<>\[\]]+")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_TYPE_WORDS = {kind.__name__: word for kind, word in _TYPES.items()}  # that schemas have in place of JSON's
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Marks of one argument."""

    begin: str
    middle: str
    """Between its name and a value that is text."""
    other_middle: str
    """The same where the value is no text."""
    around: tuple[str, str]
    """Spaces that the template puts before and behind each value."""
    end: str
    quotes: bool
    """Whether text is written as JSON, too."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """Arguments in brackets, as in a program."""

    middle: str
    """Between a name and its value."""
    close: str
    quote: str
    """Around text, which is written as it is."""

    def pairs(self, text: str, at: int, close: str) -> tuple[dict[str, Any], int]:
        """Names and values from a place up to the bracket that closes them, and the place behind it."""
        given = dict[str, Any]()
        while not (found := match_at(rf"\s*{re.escape(close)}", text, at)):
            key = match_at(self._key, text, at)
            if key is None:
                raise ValueError(f"no arguments: {text[at:]}")
            given[key[1]], at = self._value(text, key.end(), close)
            at = behind(r"\s*,\s*", text, at)
        return given, found.end()

    @property
    def _key(self) -> str:
        """The pattern of a name up to its value."""
        quote = rf"(?:{re.escape(self.quote)})?"
        return rf"\s*{quote}({_NAME}?){quote}\s*{re.escape(self.middle)}\s*"

    def _value(self, text: str, at: int, close: str) -> tuple[Any, int]:
        if text.startswith(self.quote, at):
            begin = at + len(self.quote)
            for end in (begin + one.start() for one in re.finditer(re.escape(self.quote), text[begin:])):
                after = end + len(self.quote)
                follows = match_at(r"\s*,\s*", text, after)
                is_next = follows and (close == "]" or match_at(self._key, text, follows.end()))
                if is_next or match_at(rf"\s*{re.escape(close)}", text, after):
                    return text[begin:end], after
            raise ValueError(f"no value: {text[at:]}")
        if text[at : at + 1] in ("[", "{"):
            with suppress(ValueError):
                return json.JSONDecoder().raw_decode(text, at)
            for bracket in islice(re.finditer(r"[\]}]", text[at:]), _MOST_BRACKETS):
                with suppress(ValueError, SyntaxError, MemoryError):
                    return ast.literal_eval(text[at : at + bracket.end()]), at + bracket.end()
            if text[at] == "{":
                return self.pairs(text, at + 1, "}")
            values, at = list[Any](), at + 1
            while not (found := match_at(r"\s*\]", text, at)):
                value, at = self._value(text, at, "]")
                values.append(value)
                at = behind(r"\s*,\s*", text, at)
            return values, found.end()
        bare = match_at(r"[^,\s\[\](){}]+", text, at)
        if bare is None:
            raise ValueError(f"no value: {text[at:]}")
        return _value(bare[0], None, None, quotes=True), bare.end()


@dataclass(frozen=True, slots=True)
class SpelledCallForm:
    """How one model writes a call."""

    around: tuple[str, str]
    """What stands before the first call of an answer, and behind the last one."""
    begin: str
    after_name: str
    end: str
    arguments: _Parameters | _Listed | None
    """None where they are JSON."""
    has_ids: bool = False
    """Whether what stands where the name does is the call's id, such as functions.add:0."""

    def find(self, text: str, *, tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """What an answer says besides its calls, and the calls; the whole text and none if one is malformed."""
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        around = ["".join(rf"(?:\s*{spaced(mark)})?" for mark in _MARKS.findall(text)) for text in self.around]
        # Numbers behind a name are those of the call: its place, or its id.
        before_id, begins_id, rest = re.split(r"([^\s<>\[\]]*)\Z", self.begin, maxsplit=1)
        behind_id, after = re.fullmatch(r"([^\s<>\[\]({]*)(.*)", self.after_name, re.DOTALL).groups()  # type: ignore[union-attr]
        numbered = [re.sub(r"\d+", lambda _: r"\w+", spaced(part)) for part in (behind_id, after)]
        named = rf"(?P<id>{re.escape(begins_id)}(?P<name>{_NAME})\s*{numbered[0]})\s*{numbered[1]}"
        named = named + r"\s*" if self.arguments is None else named

        def read(text: str, begin: re.Match[str]) -> tuple[list[ToolCall], int]:
            calls, at = list[ToolCall](), begin.start("id")
            while found := match_at(named, text, at):
                given, at = self._arguments(text, found.end(), schemas.get(found["name"]))
                calls.append(ToolCall(found["name"], given, found["id"] if self.has_ids else ""))
                if not isinstance(self.arguments, _Listed) or not (comma := match_at(r"\s*,\s*", text, at)):
                    break
                at = comma.end()
            end = match_at(rf"\s*{spaced(self.end)}", text, at)
            if end is None or not calls:
                raise ValueError(f"no call: {text[begin.start() :]}")
            return calls, end.end()

        try:
            begin = re.compile(rf"{spaced(before_id)}\s*(?={re.escape(begins_id)})(?P<id>)")
            return find_marked(text, begin, read, around=around)
        except ValueError:
            return text, []

    def _arguments(self, text: str, at: int, schema: object) -> tuple[dict[str, Any], int]:
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        if isinstance(self.arguments, _Listed):
            return self.arguments.pairs(text, at, self.arguments.close)
        if self.arguments is None:
            arguments, at = json.JSONDecoder().raw_decode(text, at)
            if not isinstance(arguments, dict):
                raise ValueError(f"no arguments: {arguments}")
            return arguments, at
        marks, given = self.arguments, dict[str, Any]()
        middle = rf"(?:(?P<text>{spaced(marks.middle)})|{spaced(marks.other_middle)})"
        # A value may have the mark of its end in it, which nothing follows that follows a value.
        next_marks = map(spaced, [marks.begin, *([self.end] if self.end else _MARKS.findall(self.around[1]))])
        value_end = rf"{spaced(marks.end)}(?=\s*({'|'.join(next_marks)}|\Z))"
        one = rf"(?s)\s*{spaced(marks.begin)}\s*(?P<key>.+?)\s*{middle}(?P<value>.*?){value_end}"
        while found := match_at(one, text, at):
            value = found["value"].removeprefix(marks.around[0]).removesuffix(marks.around[1])
            is_text = marks.middle != marks.other_middle and found["text"] is not None
            own = {"type": "string"} if is_text else known.get(found["key"])
            given[found["key"]] = _value(value, own, schema, quotes=marks.quotes and not is_text)
            at = found.end()
        return given, at


def spelled_form_in(text: str, *, other: str = "", has_ids: bool = False) -> SpelledCallForm | None:
    """The form of a template that writes a call of `PROBED_NAME` as this text; None if it is in another one.

    Args:
        other: how it writes the call with a number in place of the text.
    """
    before, name, rest = text.partition(PROBED_NAME)
    ((key, value),) = PROBED_ARGUMENTS.items()
    listed = re.match(rf"([({{]){key}(\W)\s*(\S+?){value}\3([)}}])", rest)
    at = before.rfind("<") if listed else max(before.rfind("<"), before.rfind("["))
    if at < 0:
        at = len(before) - len(before.split()[-1]) if before.split() else at
    if not name or at < 0 or not before[at:].strip():
        return None
    wrapper, begin = "".join(before[:at].split()[-1:]), before[at:].strip()
    if listed:
        marks = _Listed(listed[2], listed[4], listed[3])
        return SpelledCallForm((wrapper, ""), begin, listed[1], rest[listed.end() :].strip(), marks, has_ids)
    for start in (match.start() for match in re.finditer("{", rest)):
        try:
            said, end = json.JSONDecoder().raw_decode(rest, start)
        except ValueError:
            continue
        if said == PROBED_ARGUMENTS and rest[:start].strip():
            end_of_call = _first_mark(rest[end:])
            around = wrapper, rest[end:].lstrip().removeprefix(end_of_call)
            return SpelledCallForm(around, begin, rest[:start].strip(), end_of_call, None, has_ids)
    before_key, has_key, after_key = rest.partition(key)
    middle, has_value, after = after_key.partition(value)
    quotes = middle.endswith('"') and after.startswith('"')
    middle, after = (middle[:-1], after[1:]) if quotes else (middle, after)
    at, end_of_value = before_key.rfind("<"), _first_mark(after)
    if not has_key or not has_value or at < 0 or not middle.strip() or not end_of_value:
        return None
    has_other, other_middle = str(PROBED_NUMBER) in other, other.partition(key)[2].partition(str(PROBED_NUMBER))[0]
    other_middle = other_middle if has_other else middle
    spaces = middle[len(middle.rstrip()) :], after[: len(after) - len(after.lstrip())]
    parameters = _Parameters(
        before_key[at:].strip(), middle.strip(), other_middle.strip(), spaces, end_of_value, quotes
    )
    behind = after.partition(end_of_value)[2].lstrip()
    end_of_call = _first_mark(behind)
    around = wrapper, behind.removeprefix(end_of_call)
    return SpelledCallForm(around, begin, before_key[:at].strip(), end_of_call, parameters, has_ids)


def _first_mark(text: str) -> str:
    found = re.match(r"\s*(<[^<>]+>|\[[^\[\]]+\])", text)
    return found.group(1) if found else ""


def _value(text: str, schema: object, root: object, *, quotes: bool) -> Any:
    """What a text stands for by the schema of its argument: itself, JSON, or a constant of Python's, in which many
    templates write what is no text."""
    kinds = set(_kinds(schema, root))
    if kinds == {"string"} and not quotes:
        return text
    for value in _readings(text, quotes=quotes):
        own = "null" if value is None else _TYPES[type(value)]
        if not kinds or own in kinds or (own == "integer" and "number" in kinds) or (own == "string" and quotes):
            return value
    return text if "string" in kinds or not kinds else next(_readings(text, quotes=quotes), text)


def _readings(text: str, *, quotes: bool) -> Iterator[Any]:
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if quotes or not isinstance(value, str):
            yield value
    if (word := text.strip()) in _PYTHON_WORDS:
        yield _PYTHON_WORDS[word]
    if word.startswith(("[", "{")):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(word)
            if isinstance(value, list | dict):
                yield value


def _kinds(schema: object, root: object) -> Iterator[str]:
    """The types of JSON that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found != schema:
            yield from _kinds(found, root)
    given = schema.get("type")
    for kind in given if isinstance(given, list) else [given]:
        word = _TYPE_WORDS.get(str(kind).lower(), str(kind).lower())
        if word in _TYPES.values() or word == "null":
            yield word
    for value in [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())] if given is None else ():
        yield "null" if value is None else _TYPES.get(type(value), "string")
    if schema.get("nullable"):
        yield "null"
    for several in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(several) or ():
            yield from _kinds(one, root)
