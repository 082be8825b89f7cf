"""ChatTemplate: the Jinja template of a model directory, in the environment that such templates are written for.

    chat_template.jinja, or tokenizer_config.json's `chat_template` ──► messages, tools ──► text with its special tokens

A template comes with a model from somewhere, so it runs in Jinja's sandbox and sees plain data only. What it may call
beside Jinja's own is what transformers gives it: raise_exception, strftime_now, a tojson that escapes nothing for HTML,
loop controls, and generation blocks, which mark what a model said and change no text.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from corral.experiments.prompts.messages import Message, ToolSchema, json_text, with_text_arguments
from corral.experiments.prompts.spelled_calls import SpelledCallForm, spelled_form_in
from corral.experiments.prompts.tokens import first_index, read_settings
from corral.experiments.prompts.tool_calls import (
    PROBED_ARGUMENTS,
    PROBED_ID,
    PROBED_NAME,
    PROBED_NUMBER,
    PROBED_TOOL,
    JsonCallForm,
    call_of,
    json_form_in,
)
from corral.experiments.regular_file import read_regular
from corral.scheduling.errors import RuleError

ASKED = {"role": "user", "content": "q"}
_PROBED_QUESTION = {"role": "user", "content": "probed question"}
_GIVEN = ("messages", "tools", "add_generation_prompt")  # to each template, by what renders
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One model's way to write a conversation down."""

    templates: Mapping[str, Template]
    """By name: "default", and "tool_use" where there is another one for requests with tools."""
    special_tokens: Mapping[str, str]
    takes_text_arguments: bool = False
    """Whether it wants the arguments of calls as JSON text, as OpenAI has them; most templates want objects."""
    takes_parts: bool = False
    """Whether it reads the content of messages only where that is a list of parts."""
    reads: frozenset[str] = frozenset()
    """Names of the variables that it reads."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values of such variables beside messages and tools, such as enable_thinking."""

    @classmethod
    def of_model(cls, directory: Path, arguments: Mapping[str, Any] = MappingProxyType({})) -> "ChatTemplate":
        """
        Args:
            arguments: as `with_arguments` takes them.

        Raises:
            ValueError: if the model has none, or it takes no such arguments.
        """
        config = read_settings(directory / "tokenizer_config.json")
        sources = _sources(directory, config)
        if "default" not in sources:
            raise RuleError(
                f"model {directory} has no chat template: neither chat_template.jinja nor a chat_template in "
                "tokenizer_config.json",
                "use the instruction-tuned model, add its template, or give prompts as text",
            )
        environment = _environment()
        try:
            templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateError as error:
            raise RuleError(
                f"the chat template of model {directory} is broken: {error}", "download it again"
            ) from error
        tokens = {name: _text_of(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
        reads = set[str]().union(*(find_undeclared_variables(environment.parse(one)) for one in sources.values()))
        template = cls(templates, tokens, reads=frozenset(reads - set(_GIVEN))).with_arguments(arguments)
        if not template._shows([_PROBED_QUESTION]) and replace(template, takes_parts=True)._shows([_PROBED_QUESTION]):
            template = replace(template, takes_parts=True)
        called = [_PROBED_QUESTION, call_of(PROBED_ARGUMENTS)]
        other = replace(template, takes_text_arguments=True)
        return other if not template._shows(called) and other._shows(called) else template

    def with_arguments(self, arguments: Mapping[str, Any]) -> "ChatTemplate":
        """The same, with these arguments over its own.

        Raises:
            ValueError: if it reads no variable of such a name.
        """
        if unread := sorted(arguments.keys() - self.reads):
            known = ", ".join(sorted(self.reads - set(_SPECIAL_TOKENS))) or "none"
            raise RuleError(f"the model's chat template takes no argument {unread[0]!r}", f"it takes: {known}")
        return replace(self, arguments={**self.arguments, **arguments})

    @property
    def probed_tools(self) -> Sequence[ToolSchema]:
        """What a conversation with calls is shown beside, so that the template for such conversations writes it."""
        return (PROBED_TOOL,) if "tool_use" in self.templates else ()

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), asks: bool = True) -> str:
        """A conversation as text.

        Args:
            messages: as `plain_messages` gives them.
            asks: whether an answer of the model is begun behind it.

        Raises:
            ValueError: if the template refuses it.
        """
        template = self.templates["tool_use" if tools and "tool_use" in self.templates else "default"]
        if self.takes_text_arguments:
            messages = [with_text_arguments(message) for message in messages]
        if self.takes_parts:
            messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
        try:
            text = template.render(
                {**self.special_tokens, **self.arguments},
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=asks,
            )
            return text.encode(errors="replace").decode()  # a half of a surrogate pair is no character
        except (TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            return _PROBED_QUESTION["content"] in self.render(messages, tools=self.probed_tools)
        except ValueError:
            return False


class _GenerationBlocks(Extension):
    """{% generation %}...{% endgeneration %} is what is in it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = json_text
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def has_template(directory: Path) -> bool:
    """Whether a model can be chatted with."""
    return "default" in _sources(directory, read_settings(directory / "tokenizer_config.json"))


def _sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. Files of their own count, where there are some, and what the tokenizer's configuration says does not."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    found = {name: read_regular(path).decode() for name, path in files.items() if path.exists()}
    given = config.get("chat_template") or read_settings(directory / "chat_template.json").get("chat_template")
    if found or not given:
        return found
    return {"default": given} if isinstance(given, str) else {one["name"]: one["template"] for one in given}


def _text_of(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


# What a chat template does, found by showing it conversations that are known: no model is known by its name.
#
# a call ──────► its text ──► how calls are written           CONTENT, REASONING: texts that no model says
# reasoning ───► its text ──► what stands around it
# an answer ───► its text ──► what ends it

ToolCallForm = JsonCallForm | SpelledCallForm
CALLS, SEVERAL_CALLS, RESULTS, TOOLS = "calls of tools", "more than one call of an answer", "tools' results", "tools"
CONTENT, REASONING = "stand-in-of-content", "stand-in-of-reasoning"
_MIXED = {"a": "x\n", "b": 1, "c": True, "d": {"e": [None, "y"]}, "f": False}
_THINK = ("<think>", "</think>")
_MARK = r"(<[^<>\s]+>|\[[^\[\]\s]+\])"
_LAST_MARK, _FIRST_MARK = re.compile(r"((?:<[^<>\s]+>|\[[^\[\]\s]+\])\w*)\s*\Z"), re.compile(r"\A\s*" + _MARK)


def stand_in_for(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The same kind of answer, with nothing in it that the model made."""
    marks = {"content": CONTENT, "reasoning_content": REASONING, "thinking": REASONING}
    stand_in = {**answer, **{key: mark for key, mark in marks.items() if answer.get(key)}}
    if "tool_calls" in answer:
        calls = answer["tool_calls"]
        stand_in["tool_calls"] = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
    return stand_in


def around_answer(template: ChatTemplate) -> tuple[str, str]:
    """What a template writes before and behind an answer to `ASKED` that is the last message."""
    rendered = template.render([ASKED, {"role": "assistant", "content": CONTENT}], asks=False)
    before, _, behind = rendered.partition(CONTENT)
    return before, behind


def reasoning_marks(template: ChatTemplate) -> tuple[str, str] | None:
    """What a template writes around reasoning; of one that only takes it out of what was said, what it looks for."""
    apart = {"role": "assistant", "content": CONTENT, "reasoning_content": REASONING, "thinking": REASONING}
    before, thought, after = template.render([ASKED, apart], asks=False).partition(REASONING)
    begin, end = _LAST_MARK.search(before), _FIRST_MARK.search(after)
    if thought and begin and end:
        # What stands around every message marks no reasoning, as in the channels of gpt-oss.
        is_its_own = begin.group(1) not in template.render([ASKED], asks=False)
        return (begin.group(1), end.group(1)) if is_its_own else None
    within = {"role": "assistant", "content": f"{_THINK[0]}\n{REASONING}\n{_THINK[1]}\n\n{CONTENT}"}
    return None if REASONING in template.render([ASKED, within, ASKED], asks=False) else _THINK


def end_of_call(template: ChatTemplate) -> str:
    """What a template writes behind the last call of a conversation; empty if it writes no calls."""
    try:
        text = template.render([ASKED, call_of(PROBED_ARGUMENTS)], tools=template.probed_tools, asks=False)
    except ValueError:
        return ""
    return text.rpartition(next(iter(PROBED_ARGUMENTS.values())))[2]


def unwritten(template: ChatTemplate) -> frozenset[str]:
    """Which of calls, several calls, results and tools a template leaves out of a conversation."""
    asked, called = {"role": "user", "content": CONTENT}, call_of(PROBED_ARGUMENTS)
    twice = call_of(PROBED_ARGUMENTS, dict.fromkeys(PROBED_ARGUMENTS, REASONING))
    result = {"role": "tool", "tool_call_id": PROBED_ID, "name": PROBED_NAME, "content": REASONING}
    (value,) = PROBED_ARGUMENTS.values()
    shown = {
        CALLS: ([asked, called], value),
        SEVERAL_CALLS: ([asked, twice], REASONING),
        RESULTS: ([asked, called, result], REASONING),
    }
    missing = set()
    for what, (messages, text) in shown.items():
        with suppress(ValueError):  # what it refuses, it does not leave out
            if text not in template.render(messages, tools=template.probed_tools):
                missing.add(what)
    with suppress(ValueError):
        if template.render([asked], tools=[PROBED_TOOL]) == template.render([asked]):
            missing.add(TOOLS)
    return frozenset(missing)


def tool_call_form(template: ChatTemplate, *, ends: Collection[str]) -> ToolCallForm | None:
    """How a template writes calls; None if in no form that is known, or if it cannot be read back in that form.

    Args:
        ends: the texts of what ends an answer.
    """
    called = partial(_called, template, ends=ends)
    text = called(PROBED_ARGUMENTS)
    if has_ids := PROBED_NAME not in text and PROBED_ID in text:
        called = partial(called, call_id=f"functions.{PROBED_NAME}:0")
        text = called(PROBED_ARGUMENTS)
    names_of_a_call = text.count(PROBED_NAME)
    number = called(dict.fromkeys(PROBED_ARGUMENTS, PROBED_NUMBER))
    form = json_form_in(text) or spelled_form_in(text, other=number, has_ids=has_ids)
    if form is None:
        return None
    for each in ([_MIXED], [PROBED_ARGUMENTS, _MIXED]):
        text = called(*each)
        read = form.find(text, tools=[PROBED_TOOL])[1]
        if text.count(PROBED_NAME) >= len(each) * names_of_a_call and [call.arguments for call in read] != each:
            return None
    return form


def _called(template: ChatTemplate, *each: Mapping[str, Any], ends: Collection[str], call_id: str = PROBED_ID) -> str:
    """What an answer is that calls `PROBED_NAME`; empty if the template does not write it."""
    tools = template.probed_tools
    try:
        asked = template.render([ASKED], tools=tools)
        text = template.render([ASKED, call_of(*each, call_id=call_id)], tools=tools, asks=False)
    except ValueError:
        return ""
    both = re.sub(r"<[^>]*\Z", "", os.path.commonprefix([asked, text]))  # not in the middle of a mark
    behind = text[len(both) :]
    return behind[: first_index(behind, ends, max(behind.find(PROBED_NAME), 0))]
