"""Agents that need nothing but the model and the trial's reward.

single_turn     prompt ──generate──► answer
feedback        prompt ──generate──► answer ──judge──► wrong: say so ──► generate ... until it is right, or turns end
"""

import asyncio
import inspect
import json
import logging
import math
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from corral.workers.agents.contract import EpisodeEndedError, Message, Outcome, Task, ToolCall, Turn
from corral.workers.agents.session import Session
from corral.workers.data.side_numbers import side_number


async def single_turn(task: Task, session: Session) -> None:
    """Ask once; `rollout.reward` judges the answer. Rollout workers do the same without a process for it."""
    await session.generate()


async def feedback(
    task: Task,
    session: Session,
    *,
    feedback: str = "\nThat is wrong. Try again.\n",
    max_turns: int = 2,
    right: float = 1.0,
) -> Outcome:
    """Ask again, with feedback, as long as `rollout.reward` says that an answer is wrong; the last one counts.

    Args:
        feedback: what is said behind a wrong answer.
        max_turns: answers at most.
        right: the reward from which on an answer is right.
    """
    turn = await session.generate()
    reward = await session.judge(turn)
    ended, num_turns = "", 1
    try:
        while reward < right and num_turns < max_turns:
            await session.say(feedback)
            turn = await session.generate()
            num_turns += 1
            reward = await session.judge(turn)
    except EpisodeEndedError as error:
        ended = error.reason
    return Outcome(reward, ended=ended)


# The agent `program`: a program of somebody else's plays the episode, which knows OpenAI's API and nothing of a trial.
#
# the row, as JSON ──stdin──► program ⇄ OPENAI_BASE_URL, OPENAI_API_KEY
#                                └── last line of its output: a number, or {"reward": ..., more numbers}
#                                    └── neither: `rollout.reward` judges the model's last answer
#
# Its key opens this episode, and programs of other episodes run as the same user. So each has a user namespace of its
# own, by bubblewrap: the kernel shows it no environment and no memory of another program, or of the agents' process.

logger = logging.getLogger(__name__)

_BWRAP_TIMEOUT_S = 30.0
_LAST_WORDS = 2000  # bytes of what it said, where it fails


class ProgramError(RuntimeError):
    """A program failed, or did not end in time."""


async def program(task: Task, session: Session, *, command: Sequence[str], timeout_s: float = 250.0) -> Outcome | None:
    """Run a program for each episode.

    Args:
        command: its words; it starts where the agents' processes do, and `python` is the one that they have.
        timeout_s: after which it is killed, and the episode has failed. Less than `rollout.agent_timeout_s`.

    Raises:
        ProgramError: if it fails, or takes longer.
    """
    endpoint = session.endpoint
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "PATH": path, "OPENAI_BASE_URL": endpoint.base_url}
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb") as options:
        if apart := await asyncio.to_thread(_own_namespace):
            # Not in the environment of bwrap: before it has made the namespace, that is open to the other programs.
            options.write(f"--setenv\0OPENAI_API_KEY\0{endpoint.api_key}\0".encode())
            command = [*apart, "--args", str(reading), "--", *command]
        else:
            environment["OPENAI_API_KEY"] = endpoint.api_key
        options.close()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            pass_fds=[reading] if apart else [],
        )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate(json.dumps(dict(task.fields)).encode())
    except TimeoutError as error:
        raise ProgramError(f"{command[0]} did not end within {timeout_s:g} s") from error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode != 0:
        message = errors[-_LAST_WORDS:].decode(errors="replace").strip()
        raise ProgramError(f"{command[0]} ended with {process.returncode}: {message or 'it said nothing'}")
    return outcome_of(output.decode(errors="replace"))


@cache
def _own_namespace() -> tuple[str, ...]:
    """The words before a program that give it a user namespace of its own; none where this machine cannot."""
    words = (shutil.which("bwrap") or "bwrap", "--unshare-user", "--dev-bind", "/", "/", "--die-with-parent")
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True, timeout=_BWRAP_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("a program can read the keys of other episodes here, since bubblewrap cannot run: %s", error)
        return ()
    return words


def outcome_of(output: str) -> Outcome | None:
    """What a program's last line says; None if that is neither a number nor an object with a reward.

    Example:
        outcome_of('thinking...\\n{"reward": 1, "calls": 2}') == Outcome(1.0, metrics={"calls": 2.0})
    """
    *_, last = output.splitlines() or [""]
    try:
        result = json.loads(last)
    except ValueError:
        return None
    numbers = result if isinstance(result, dict) else {"reward": result}
    values = {name: side_number(value) for name, value in numbers.items() if isinstance(value, int | float)}
    if not math.isfinite(values.get("reward", math.nan)):
        return None
    return Outcome(values.pop("reward"), metrics=values)


# The agent `tools`: plain Python functions that a model may call, as its chat template says, or by a pattern of text.
#
#     function ──signature, docstring──► schema ──► the model's template
#     answer ──calls──► function(**arguments) ──► what it returned, or what it raised ──► said to it ──► next answer
#            └── none: the episode is over, and `rollout.reward` judges it
#
# A tool runs in the agent's process, between answers: it has to be quick, or async. One that raises is answered with
# its error: the model may learn from it.

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
