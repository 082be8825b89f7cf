"""ChatTemplate: the Jinja template of a model directory, in the environment that such templates are written for.

    chat_template.jinja, or tokenizer_config.json's `chat_template` ──► messages, tools ──► text with its special tokens

A template comes with a model from somewhere, so it runs in Jinja's sandbox and sees plain data only. What it may call
beside Jinja's own is what transformers gives it: raise_exception, strftime_now, a tojson that escapes nothing for HTML,
loop controls, and generation blocks, which mark what a model said and change no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
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
from corral.experiments.prompts.tokens import read_settings
from corral.experiments.prompts.tool_calls import PROBED_ARGUMENTS, PROBED_TOOL, call_of
from corral.experiments.regular_file import read_regular

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
            raise ValueError(
                f"model {directory} has no chat template: neither chat_template.jinja nor a chat_template in "
                "tokenizer_config.json; use the instruction-tuned model, add its template, or give prompts as text"
            )
        environment = _environment()
        try:
            templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateError as error:
            raise ValueError(f"the chat template of model {directory} is broken: {error}; download it again") from error
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
            raise ValueError(f"the model's chat template takes no argument {unread[0]!r}; it takes: {known}")
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
