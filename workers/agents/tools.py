"""The agent `tools`: plain Python functions that a model may call, as its chat template says, or by a pattern of text.

    function ──signature, docstring──► schema ──► the model's template
    answer ──calls──► function(**arguments) ──► what it returned, or what it raised ──► said to it ──► next answer
           └── none: the episode is over, and `rollout.reward` judges it

A tool runs in the agent's process, between answers: it has to be quick, or async. One that raises is answered with its
error: the model may learn from it.
"""

import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from corral.workers.agents.contract import Message, Outcome, Task, ToolCall, Turn
from corral.workers.agents.session import Session

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_LISTS = (list, tuple, set, frozenset, Sequence)
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Tool = Callable[..., Any]


def schema_of(tool: Tool) -> dict[str, Any]:
    """A function as chat templates show it: name, first paragraph of its docstring, parameters with their types and
    what `Args:` says of them. Parameters like *rest and **more are not shown: a model cannot name them.

    Example:
        schema_of(calculator)["function"]["parameters"]["required"] == ["expression"]
    """
    hints, text = get_type_hints(tool), inspect.getdoc(tool) or ""
    parameters = {name: one for name, one in inspect.signature(tool).parameters.items() if one.kind not in _OPEN}
    properties = {name: _type_of(hints.get(name)) | _described(text, name) for name in parameters}
    required = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": tool.__name__,
            "description": re.split(r"\n\n|\n *Args:", text)[0].strip(),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _type_of(hint: Any) -> dict[str, Any]:
    """The schema of a type; empty for one that JSON does not know."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return _type_of(inner[0])
    if kind is Literal:
        types = {_JSON_TYPES[type(value)] for value in inner if type(value) in _JSON_TYPES}
        return ({"type": next(iter(types))} if len(types) == 1 else {}) | {"enum": list(inner)}
    if kind in (Union, UnionType):
        given = [_type_of(one) for one in inner if one is not NoneType]
        optional = {"nullable": True} if NoneType in inner else {}
        several = {"type": [one["type"] for one in given]} if all(one.keys() == {"type"} for one in given) else {}
        return (given[0] if len(given) == 1 else several or {"anyOf": given}) | optional
    if kind in _LISTS:
        items = _type_of(inner[0]) if inner else {}
        return {"type": "array"} | ({"items": items} if items else {})
    if kind in (dict, Mapping):
        values = _type_of(inner[1]) if len(inner) == 2 else {}
        return {"type": "object"} | ({"additionalProperties": values} if values else {})
    return {"type": _JSON_TYPES[kind]} if kind in _JSON_TYPES else {}


def _described(docstring: str, name: str) -> dict[str, str]:
    """What `Args:` of a docstring in Google's form says of a parameter."""
    _, _, arguments = docstring.partition("Args:\n")
    found = re.search(rf"^( +){name}(?: *\([^)\n]*\))?: *(.*(?:\n\1 +.*)*)", arguments, re.MULTILINE)
    return {"description": " ".join(found[2].split())} if found else {}


async def run_tool(by_name: Mapping[str, Tool], call: ToolCall) -> str:
    """What a tool says to a call, as text; of one that is not there or raises, the error."""
    try:
        if call.name not in by_name:
            raise LookupError(f"there is no tool {call.name!r}; there are {', '.join(by_name)}")
        result = by_name[call.name](**call.arguments)
        if inspect.isawaitable(result):
            result = await result
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return result if isinstance(result, str) else json.dumps(result, default=str)


async def tools(
    task: Task,
    session: Session,
    *,
    tools: Sequence[str],
    call: str = "",
    stop: Sequence[str] = (),
    reply: str = "{output}\n",
    max_calls: int = 4,
) -> Outcome:
    """Let the model call functions until it answers without a call; `rollout.reward` judges that answer.

    A prompt that is text is what a user says, unless `call` is given.

    Args:
        tools: import paths of the functions.
        call: for models without a chat template: the pattern of a call at the end of an answer. Its named groups are
            the arguments, but for `tool`, which names the function where there are several.
        stop: texts that end an answer, such as the last character of a call.
        reply: how the output is said where `call` is given.
        max_calls: calls that are run in an episode; an answer with a further one is the last.
    """
    by_name = {tool.__name__: tool for tool in map(pkgutil.resolve_name, tools)}
    schemas = [] if call else [schema_of(tool) for tool in by_name.values()]
    num_calls = 0
    if not call:  # the prompt, as the template writes it beside tools
        asked = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
        session = session.branch(history=[])
        await session.say(asked, tools=schemas)
    turn = await session.generate(stop=stop, tools=schemas)
    while (calls := _calls_of(turn, call, by_name)) and num_calls < max_calls:
        num_calls += len(calls)
        outputs = [await run_tool(by_name, each) for each in calls]
        if call:
            await session.say("".join(reply.format(output=output) for output in outputs))
        else:
            await session.say(list(map(_answer_to, calls, outputs)))
        turn = await session.generate(stop=stop, tools=schemas)
    return Outcome(None, metrics={"tool_calls": float(num_calls)})


def _calls_of(turn: Turn, pattern: str, by_name: Mapping[str, Tool]) -> Sequence[ToolCall]:
    if not pattern:
        return turn.tool_calls
    found = re.search(f"(?:{pattern})$", turn.text)
    if found is None:
        return ()
    arguments = found.groupdict()
    return [ToolCall(arguments.pop("tool", None) or next(iter(by_name)), arguments)]


def _answer_to(call: ToolCall, output: str) -> Message:
    named = {"tool_call_id": call.id} if call.id else {}
    return {"role": "tool", "name": call.name, "content": output, **named}


def calculator(expression: str) -> str:
    """Adds, subtracts and multiplies whole numbers, as in 12+34*2."""
    if not re.fullmatch(r"\d{1,12}([+*-]\d{1,12}){0,16}", expression):
        raise ValueError(f"cannot compute {expression!r}; write whole numbers with + - * between them")
    total = 0
    for sign, term in re.findall(r"([+-]?)(\d+(?:\*\d+)*)", expression):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += -product if sign == "-" else product
    return str(total)
