"""Tool calls in the text of an answer: found in the form that the model's own chat template writes them in.

    template ──a call that is known──► its text ──► JsonCallForm     <tool_call>{"name": ., "arguments": .}</tool_call>
                                                        │                           {"name": ., "parameters": .}
    text of an answer ──────────────────────────────────┴──► what was said besides, calls

No model is known by its name: a template that writes calls as JSON shows what stands around it and how its keys are
called. One that spells the name out is of spelled_calls.py. What is no well-formed call is what the model said, and
stays in the text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.experiments.prompts.messages import ToolSchema

PROBED_NAME, PROBED_ARGUMENTS = "probed_function", {"probed_key": "probed_value"}
PROBED_NUMBER, PROBED_ID = 1234567, "123456789"  # nine characters, as Mistral's templates want an id
PROBED_TOOL = {
    "type": "function",
    "function": {"name": PROBED_NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}
_PYTHON_TAG = "<|python_tag|>"  # Llama 3 begins a call with it, or does not


def call_of(*each: Mapping[str, Any], call_id: str = PROBED_ID) -> dict[str, Any]:
    """An answer that calls a function that is known with each of these arguments, which templates are shown."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": PROBED_NAME, "arguments": arguments}}
        for arguments in each
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a model in an answer."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """As the conversation's messages name it; "" where its form has no names."""


@dataclass(frozen=True, slots=True)
class JsonCallForm:
    """How one model writes a call.

    Example:
        form = JsonCallForm("<tool_call>", "</tool_call>", "name", "arguments")
        form.find('Let me see.\\n<tool_call>\\n{"name": "look", "arguments": {}}\\n</tool_call>', tools=[look])
        # ("Let me see.", [ToolCall("look", {})])
    """

    begin: str
    """What stands before the JSON of a call; empty if an answer is a call or none."""
    end: str
    name_key: str
    """Empty where the name itself is the key of the arguments."""
    arguments_key: str
    before_name: str | None = None
    """What stands before the name where it comes in front of `begin` as well; None where it does not."""

    def find(self, text: str, *, tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """What an answer says besides its calls, and the calls; the whole text and none if one is malformed.

        Args:
            tools: those that there are. Where nothing but its JSON marks a call, only they are called.
        """
        try:
            if self.begin:
                names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
                name = "" if self.before_name is None else rf"{spaced(self.before_name)}({names})\s*"
                return find_marked(text, re.compile(name + spaced(self.begin)), self._read)
            whole = text.strip().removeprefix(_PYTHON_TAG)
            calls, end = self._calls(whole, 0)
        except ValueError:
            return text, []
        known = {tool["function"]["name"] for tool in tools}
        is_call = end == len(whole) and all(call.name in known for call in calls)
        return ("", calls) if is_call else (text, [])

    def _read(self, text: str, begin: re.Match[str]) -> tuple[list[ToolCall], int]:
        calls, at = self._calls(text, begin.end())
        end = match_at(rf"\s*{spaced(self.end)}", text, at)
        if end is None and text[at:].strip():
            raise ValueError(f"no call: {text[begin.start() :]}")
        return calls, end.end() if end else at

    def _calls(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        """Of JSON objects, or lists of them, one after the other; and where they end.

        Raises:
            ValueError: if anything is no call.
        """
        calls: list[ToolCall] = []
        while not calls or text.startswith("{", behind(r"[\s;,]*", text, at)):
            value, at = json.JSONDecoder().raw_decode(text, behind(r"[\s;,]*", text, at))
            calls += [self._call(call) for call in (value if isinstance(value, list) else [value])]
        return calls, behind(r"\s*", text, at)

    def _call(self, value: Any) -> ToolCall:
        name, arguments = None, None
        if isinstance(value, dict) and self.name_key:
            name, arguments = value.get(self.name_key), value.get(self.arguments_key)
        elif isinstance(value, dict) and len(value) == 1:
            ((name, arguments),) = value.items()
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(f"no call: {value}")
        return ToolCall(name, arguments)


def json_form_in(text: str) -> JsonCallForm | None:
    """The form of a template that writes a call of `PROBED_NAME` as this text; None if it is no JSON."""
    decoder = json.JSONDecoder()
    for start in (index for index, character in enumerate(text) if character in "[{"):
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            continue
        call = value[0] if isinstance(value, list) and value else value
        if not isinstance(call, dict):
            continue
        keys = [key for wanted in (PROBED_NAME, PROBED_ARGUMENTS) for key, given in call.items() if given == wanted]
        keys = ["", ""] if call == {PROBED_NAME: PROBED_ARGUMENTS} else keys
        if len(keys) == 2:
            before, after = text[:start].split(), text[end:].split()
            in_front, is_named, begin = (before[-1] if before else "").rpartition(PROBED_NAME)
            before_name = in_front if is_named else None
            return JsonCallForm(begin, after[0] if after else "", keys[0], keys[1], before_name)
    return None


def find_marked(
    text: str,
    begin: re.Pattern[str],
    read: Callable[[str, re.Match[str]], tuple[list[ToolCall], int]],
    *,
    around: Sequence[str] = ("", ""),
) -> tuple[str, list[ToolCall]]:
    """What an answer says besides calls that begin with a mark, and the calls.

    Args:
        read: gives the calls behind a mark, and where they end; ValueError if they are malformed.
        around: patterns of what may stand before and behind calls, and is no part of what is said.
    """
    said, calls, at = [""], list[ToolCall](), 0
    while found := begin.search(text, at):
        here, end = read(text, found)
        said[-1] += re.sub(rf"{around[0]}\s*\Z", "", text[at : found.start()])
        calls, at = calls + here, behind(rf"{around[1]}\s*[;,]?", text, end)
        said.append("")
    return ("".join([*said, text[at:]]).strip(), calls) if calls else (text, [])


def spaced(marks: str) -> str:
    """A pattern of marks with any spaces between them."""
    return r"\s*".join(map(re.escape, marks.split()))


def match_at(pattern: str, text: str, at: int) -> re.Match[str] | None:
    """What of a text matches at a place."""
    return re.compile(pattern).match(text, at)


def behind(pattern: str, text: str, at: int) -> int:
    """The place behind what matches at a place; the same place if nothing does."""
    found = match_at(pattern, text, at)
    return found.end() if found else at
