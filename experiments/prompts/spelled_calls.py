"""Tool calls whose name stands between marks of the template's, and whose arguments are JSON or marked one by one.

    <function=add>{"a": 1}</function>          [TOOL_CALLS]add[ARGS]{"a": 1}          name, then JSON
    <tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>      name, then each
    <tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>

Which marks these are shows in a call that is known. Spaces and line breaks between them may be any.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.experiments.prompts.messages import ToolSchema
from corral.experiments.prompts.tool_calls import PROBED_ARGUMENTS, PROBED_NAME, ToolCall

_NAME = r"([^\s<>\[\]{}\"'|=]+)"


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Marks of one argument."""

    begin: str
    middle: str
    """Between its name and its value."""
    end: str


@dataclass(frozen=True, slots=True)
class SpelledCallForm:
    """How one model writes a call."""

    wrapper: str
    """What stands before the first of several."""
    begin: str
    after_name: str
    end: str
    parameters: _Parameters | None
    """None where arguments are JSON."""

    def find(self, text: str, *, tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """What an answer says before its calls, and the calls; the whole text and none if one is malformed."""
        said, *pieces = text.split(self.begin)
        properties = {tool["function"]["name"]: _properties(tool) for tool in tools}
        try:
            calls = [self._call(piece, properties) for piece in pieces]
        except ValueError:
            return text, []
        return (said.rstrip().removesuffix(self.wrapper).strip(), calls) if calls else (text, [])

    def _call(self, piece: str, properties: Mapping[str, Mapping[str, Any]]) -> ToolCall:
        # Numbers are those of the call: its place, or its id.
        after_name = re.sub(r"\d+", lambda match: r"\w+", _spaced(self.after_name))
        named = re.match(rf"\s*{_NAME}\s*{after_name}\s*", piece)
        if named is None or (self.end and self.end not in piece):
            raise ValueError(f"no call: {piece}")
        name = named.group(1)
        body = piece[named.end() :]
        if self.parameters is None:
            arguments, _ = json.JSONDecoder().raw_decode(body)
            if not isinstance(arguments, dict):
                raise ValueError(f"no arguments: {body}")
            return ToolCall(name, arguments)
        marks = self.parameters
        pattern = rf"{_spaced(marks.begin)}\s*(.+?)\s*{_spaced(marks.middle)}(.*?){_spaced(marks.end)}"
        found = re.findall(pattern, body, re.DOTALL)
        known = properties.get(name, {})
        return ToolCall(name, {key: _value(text.strip("\n"), known.get(key)) for key, text in found})


def spelled_form_in(text: str) -> SpelledCallForm | None:
    """The form of a template that writes `PROBE` as this text; None if it is in another one."""
    before, name, rest = text.partition(PROBED_NAME)
    at = max(before.rfind("<"), before.rfind("["))
    if not name or at < 0:
        return None
    wrapper, begin = before[:at].split(), before[at:].strip()
    for start in (match.start() for match in re.finditer("{", rest)):
        try:
            value, end = json.JSONDecoder().raw_decode(rest, start)
        except ValueError:
            continue
        if value == PROBED_ARGUMENTS and rest[:start].strip():
            return SpelledCallForm("".join(wrapper[-1:]), begin, rest[:start].strip(), _first_mark(rest[end:]), None)
    ((key, value),) = PROBED_ARGUMENTS.items()
    before_key, has_key, after_key = rest.partition(key)
    middle, has_value, after = after_key.partition(value)
    at, end_of_value = before_key.rfind("<"), _first_mark(after)
    if not has_key or not has_value or at < 0 or not middle.strip() or not end_of_value:
        return None
    marks = _Parameters(before_key[at:].strip(), middle.strip(), end_of_value)
    end_of_call = _first_mark(after.partition(end_of_value)[2])
    return SpelledCallForm("".join(wrapper[-1:]), begin, before_key[:at].strip(), end_of_call, marks)


def _first_mark(text: str) -> str:
    found = re.match(r"\s*(<[^<>]+>|\[[^\[\]]+\])", text)
    return found.group(1) if found else ""


def _spaced(marks: str) -> str:
    """A pattern of marks with any spaces between them."""
    return r"\s*".join(map(re.escape, marks.split()))


def _properties(tool: ToolSchema) -> Mapping[str, Any]:
    parameters = tool["function"].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _value(text: str, schema: object) -> Any:
    """What a text stands for: itself where the tool wants text, else the JSON that it is, if it is one."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
