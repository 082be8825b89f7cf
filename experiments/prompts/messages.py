"""Messages: conversations as OpenAI's chat API says them, and as the chat templates of models want them."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from corral.scheduling.errors import RuleError

Message = Mapping[str, Any]
"""As OpenAI's chat API has it: role, content, and what else the role has."""
ToolSchema = Mapping[str, Any]
"""{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one thing; templates read the first or the last


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates want them: without fields that are None, text parts joined, arguments of calls as objects.

    Raises:
        ValueError: naming the message and what is wrong with it.
    """
    messages = from_json_text(messages)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError('messages must be a list of at least one {"role": ..., "content": ...}')
    plain = []
    for number, message in enumerate(messages):
        try:
            plain.append(_plain_message(message))
        except ValueError as error:
            raise ValueError(f"messages[{number}] {error}") from error
    return plain


def from_json_text(value: Any) -> Any:
    """What JSON text of an object or a list says, as CSV and tables of text have them; everything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def check_tools(tools: object) -> tuple[ToolSchema, ...]:
    """The same schemas as objects, whatever of them was JSON text.

    Raises:
        ValueError: if they are none.
    """
    tools = from_json_text(tools)
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError('must be a list of {"type": "function", "function": {...}}')
    schemas = []
    for number, tool in enumerate(map(from_json_text, tools)):
        function = from_json_text(tool.get("function")) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f'[{number}] is no {{"type": "function", "function": {{"name": ..., ...}}}}')
        parameters = from_json_text(function.get("parameters"))
        has_text = parameters is not function.get("parameters")
        schemas.append({**tool, "function": {**function, "parameters": parameters} if has_text else function})
    return tuple(schemas)


def _plain_message(message: object) -> dict[str, Any]:
    message = from_json_text(message)
    if not isinstance(message, Mapping):
        raise ValueError(f"is no object but {type(message).__name__}")
    plain = {key: value for key, value in message.items() if value is not None}
    if plain.get("role") not in _ROLES:
        raise RuleError(f"has role {plain.get('role')!r}", f"the roles are {', '.join(_ROLES)}")
    if plain["role"] == "developer":  # the later name of the same role, which few templates know
        plain["role"] = "system"
    if "content" in plain:
        plain["content"] = _joined_text(plain["content"])
    elif plain["role"] in ("assistant", "tool"):
        plain["content"] = ""  # some templates look into it, and to none is it another thing than to be missing
    else:
        raise ValueError("has no content")
    reasoning = next((plain.pop(name) for name in _REASONING if plain.get(name)), None)
    if reasoning is not None:
        plain |= {"reasoning_content": reasoning, "thinking": reasoning}
    if "tool_calls" in plain:
        plain["tool_calls"] = from_json_text(plain["tool_calls"])
        if not isinstance(plain["tool_calls"], list | tuple):
            raise ValueError(f"has tool_calls that are no list but {type(plain['tool_calls']).__name__}")
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
        if not plain["tool_calls"]:
            del plain["tool_calls"]
    return plain


def json_text(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """A value as JSON that may be sent as UTF-8: a half of a surrogate pair, which a model may say, is an escape. Its
    arguments are those of the filter `tojson` that transformers gives to chat templates."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.encode(errors="backslashreplace").decode()


def with_text_arguments(message: Message) -> dict[str, Any]:
    """A plain message whose calls have their arguments as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json_text(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else {**message}


def _joined_text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise RuleError(
        "has content that is neither text nor a list of text parts", "nothing else can be shown to the model"
    )


def _plain_call(call: object) -> dict[str, Any]:
    call = from_json_text(call)
    function = from_json_text(call.get("function")) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError('has a tool call that is no {"id": ..., "function": {"name": ..., "arguments": ...}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # the model's own, which may be anything
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
