"""Tool calls in the text of an answer: found in the form that the model's own chat template writes them in.

    template ──a call that is known──► its text ──► JsonCallForm     <tool_call>{"name": ., "arguments": .}</tool_call>
                                                        │                           {"name": ., "parameters": .}
    text of an answer ──────────────────────────────────┴──► what was said besides, calls

No model is known by its name: a template that writes calls as JSON shows what stands around it and how its keys are
called. One that spells the name out is of spelled_calls.py. What is no well-formed call is what the model said, and
stays in the text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.experiments.prompts.messages import ToolSchema

PROBED_NAME, PROBED_ARGUMENTS = "probed_function", {"probed_key": "probed_value"}
_CALL = {"id": "123456789", "type": "function", "function": {"name": PROBED_NAME, "arguments": PROBED_ARGUMENTS}}
PROBE = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
"""An answer that calls a function, which templates are shown."""
_PYTHON_TAG = "<|python_tag|>"  # Llama 3 begins a call with it, or does not


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a model asks for in an answer."""

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
    arguments_key: str

    def find(self, text: str, *, tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """What an answer says besides its calls, and the calls; the whole text and none if one is malformed.

        Args:
            tools: those that there are. Where nothing but its JSON marks a call, only they are called.
        """
        try:
            if self.begin:
                return self._marked(text)
            calls = list(self._calls(text.strip().removeprefix(_PYTHON_TAG)))
        except ValueError:
            return text, []
        names = {tool["function"]["name"] for tool in tools}
        return ("", calls) if calls and all(call.name in names for call in calls) else (text, [])

    def _marked(self, text: str) -> tuple[str, list[ToolCall]]:
        said, *marked = text.split(self.begin)
        calls: list[ToolCall] = []
        for piece in marked:
            body, _, after = piece.partition(self.end) if self.end else (piece, "", "")
            calls += self._calls(body)
            said += after
        return (said.strip(), calls) if calls else (text, [])

    def _calls(self, text: str) -> Iterator[ToolCall]:
        """Of JSON objects, or lists of them, one after the other.

        Raises:
            ValueError: if anything is no call.
        """
        rest = text.strip()
        while rest:
            value, end = json.JSONDecoder().raw_decode(rest)
            for call in value if isinstance(value, list) else [value]:
                yield self._call(call)
            rest = rest[end:].lstrip().removeprefix(";").lstrip()

    def _call(self, value: Any) -> ToolCall:
        name, arguments = (
            (value.get(self.name_key), value.get(self.arguments_key)) if isinstance(value, dict) else ("", 0)
        )
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(f"no call: {value}")
        return ToolCall(name, arguments)


def json_form_in(text: str) -> JsonCallForm | None:
    """The form of a template that writes `PROBE` as this text; None if it is no JSON."""
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
        if len(keys) == 2:
            before, after = text[:start].split(), text[end:].split()
            return JsonCallForm(before[-1] if before else "", after[0] if after else "", *keys)
    return None
