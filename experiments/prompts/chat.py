"""ChatRenderer: conversations as token ids of one model, each message written once, by the model's own template.

    messages, tools ──render──► ids ──the model──► ids + answer ──parse──► content, reasoning, tool calls
                                                     │
    new messages ────────────────────────────────────┴──bridge──► the same ids + what the template writes behind an
                                                                  answer + the new messages

What the model said stays as it said it: its ids are never made of text again. So `bridge` never renders an answer, only
what comes behind one: it asks the template for a conversation with a stand-in for the answer, and takes the text from
the token on that ends it. That is exact where the template writes everything before the answer as it did before, and
keeps the answer whole. Where it does not, such as one that leaves out the reasoning of earlier turns once the user has
spoken again, there is no bridge: the conversation has to be rendered anew, and is another branch of its episode.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from corral.experiments.prompts.chat_template import ASKED, ChatTemplate, has_template
from corral.experiments.prompts.messages import Message, ToolSchema, plain_messages, with_text_arguments
from corral.experiments.prompts.template_probes import (
    SAID,
    THOUGHT,
    ToolCallForm,
    around_answer,
    reasoning_marks,
    stand_in_for,
    tool_call_form,
)
from corral.experiments.prompts.tokens import eos_token_ids, load_tokenizer
from corral.experiments.prompts.tool_calls import ToolCall


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """An answer of the model, taken apart."""

    content: str
    """What it says, without its reasoning and its calls."""
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    text: str
    """All of it, without the token that ended it."""

    def as_message(self) -> dict[str, Any]:
        """As a message of a conversation, in OpenAI's form."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.tool_calls and not self.content else self.content,
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return with_text_arguments(message)


@dataclass(frozen=True, slots=True)
class ChatRenderer:
    """Of one model.

    Example:
        renderer = ChatRenderer.of_model(directory)
        prompt = renderer.render([{"role": "user", "content": "1+1="}])
        ids = prompt + answer                                              # sampled, with the token that ended it
        following = renderer.bridge(ids, stopped=True, messages=[{"role": "user", "content": "and 2+2?"}])
    """

    template: ChatTemplate
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    """Those that end an answer: what the model declares, and what the template writes behind one."""
    _: KW_ONLY
    tool_calls: ToolCallForm | None
    """None where the template writes calls in no form that is known, or none at all."""
    reasoning: tuple[str, str] | None
    """What stands around it; None for a template that knows of none."""
    begins_reasoning: bool
    """Whether the prompt ends with what stands before it."""

    @classmethod
    def of_model(
        cls, directory: Path, tokenizer: Any = None, *, arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> "ChatRenderer":
        """
        Args:
            tokenizer: of the directory, where it is loaded already.
            arguments: of the template, as transformers' `apply_chat_template` takes them, such as enable_thinking.

        Raises:
            ValueError: naming what is missing: a template, a tokenizer, ends of answers; or what the template does not
                read.
        """
        template = ChatTemplate.of_model(directory, arguments)
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(directory)
        return cls._of_template(template, tokenizer, eos_token_ids(directory))

    def with_arguments(self, arguments: Mapping[str, Any]) -> "ChatRenderer":
        """That of the same model with these arguments of its template over its own; raises as `of_model`."""
        if not arguments:
            return self
        return self._of_template(self.template.with_arguments(arguments), self.tokenizer, self.stop_token_ids)

    @classmethod
    def _of_template(cls, template: ChatTemplate, tokenizer: Any, ends: Sequence[int]) -> "ChatRenderer":
        stops = dict.fromkeys(ends)
        behind = tokenizer.encode(around_answer(template)[1], add_special_tokens=False).ids
        if behind and behind[0] in tokenizer.get_added_tokens_decoder():
            stops[behind[0]] = None
        reasoning = reasoning_marks(template)
        return cls(
            template,
            tokenizer,
            tuple(stops),
            tool_calls=tool_call_form(template, ends=[tokenizer.id_to_token(stop) for stop in stops]),
            reasoning=reasoning,
            begins_reasoning=reasoning is not None and template.render([ASKED]).rstrip().endswith(reasoning[0]),
        )

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> list[int]:
        """A conversation from its beginning, up to where the model is to answer.

        Raises:
            ValueError: if the template refuses it.
        """
        return self._encode(self.template.render(plain_messages(messages), tools=tools))

    def render_learned(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), num_given: int = 0
    ) -> tuple[list[int], list[bool]]:
        """A whole conversation, and of each token whether the assistant says it: from behind what the template begins
        an answer with to the token that ends it, which a model has to learn to say as well.

        Args:
            num_given: messages at its beginning that nothing is learned of.

        Raises:
            ValueError: if the template refuses it, or does not write down what the assistant says where it is to.
        """
        plain = plain_messages(messages)
        text = self.template.render(plain, tools=tools, asks=False)
        spans, end = [], 0
        for number, message in enumerate(plain):
            if message["role"] == "assistant":
                start = self._start_of_answer(text, plain[:number], tools=tools, after=end)
                end = self._first_end(text, start)[1]
                spans += [(start, end)] if number >= num_given else []
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        # A token of both, what stands before an answer and what is said, is one that the prompt would not end with.
        is_said = [any(start <= first < end for start, end in spans) for first, _ in encoding.offsets]
        return list(encoding.ids), is_said

    def bridge(
        self,
        ids: Sequence[int],
        *,
        stopped: bool,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        history: Sequence[Message] = (),
    ) -> list[int] | None:
        """What the model is to go on from, after an answer of its and the messages that follow it.

        Args:
            ids: prompt and answer, as they were sampled, with the token that ended it.
            stopped: whether the answer came to an end of its own.
            messages: what follows the answer.
            history: what the ids say, the answer last. Without it, one that looks like it stands in for it.

        Returns:
            The same ids and what follows; None if the template would write what they say in another way now.

        Raises:
            ValueError: if the template refuses the messages.
        """
        if not stopped and self._is_reasoning(ids):
            return None  # the template would close it
        *before, answer = plain_messages(history) if history else self._like(ids)
        asked = self.template.render(before, tools=tools)
        stand_in = stand_in_for(answer)
        following = plain_messages(messages) if messages else []
        text = self.template.render([*before, stand_in, *following], tools=tools)
        end, _ = self._first_end(text, len(asked))
        if not text.startswith(asked) or end == len(text):
            return None
        said = text[len(asked) : end]
        if any(mark in stand_in.values() and mark not in said for mark in (SAID, THOUGHT)):
            return None
        if self.reasoning is not None:
            begun = asked.removeprefix(self.template.render(before, tools=tools, asks=False)) if history else ""
            sampled = self._decode(ids).rpartition(begun)[2] if begun else self._decode(ids)
            if (self.reasoning[1] in said) != (self.reasoning[1] in sampled):
                return None  # a block without any reasoning, which the template leaves out or puts in
        behind = self._encode(text[end:])
        if stopped and ids[-1] in self.stop_token_ids:
            # An answer that ended in another way than the template ends it is not what the template would write.
            return [*ids, *behind[1:]] if behind[0] == ids[-1] else None
        return [*ids, *behind]

    def parse(
        self, output_ids: Sequence[int], *, stopped: bool, tools: Sequence[ToolSchema] = (), num_before: int = 0
    ) -> AssistantMessage:
        """An answer taken apart; what is not well-formed is content.

        Args:
            tools: those that it may call; without any, nothing is taken for a call.
            num_before: tokens before it. The same answer further on in a conversation has calls with other ids.
        """
        ends = stopped and bool(output_ids) and output_ids[-1] in self.stop_token_ids
        text = self._decode(output_ids[:-1] if ends else output_ids)
        reasoning, content = self._without_reasoning(text)
        found: list[ToolCall] = []
        if tools and self.tool_calls is not None:
            with suppress(RecursionError):  # nested so deep is no call: Python reads no such JSON
                content, found = self.tool_calls.find(content, tools=tools)
        calls = [replace(call, id=_call_id(num_before, output_ids, at)) for at, call in enumerate(found)]
        return AssistantMessage(content, reasoning, tuple(calls), text)

    def _without_reasoning(self, text: str) -> tuple[str, str]:
        """(reasoning, the rest). One that is not closed was cut, and nothing comes after it."""
        if self.reasoning is None:
            return "", text
        begin, end = self.reasoning
        thought, closes, rest = text.partition(end)
        if not closes and not self.begins_reasoning and not text.lstrip().startswith(begin):
            return "", text
        return thought.lstrip().removeprefix(begin).strip("\n"), rest.lstrip("\n")

    def _like(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """A conversation that has reasoning if this one has, anywhere."""
        answer = {"role": "assistant", "content": SAID}
        if self.reasoning is not None and self.reasoning[1] in self._decode(ids):
            answer["reasoning_content"] = THOUGHT
        return [ASKED, answer]

    def _is_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether reasoning is begun that is not closed."""
        if self.reasoning is None:
            return False
        begin, end = map(self._decode(ids).rfind, self.reasoning)
        return begin > end

    def _start_of_answer(
        self, text: str, before: list[dict[str, Any]], *, tools: Sequence[ToolSchema], after: int
    ) -> int:
        """Where in a conversation the answer to these messages begins; `after` is the end of the one before."""
        asked = self.template.render(before, tools=tools)
        if text.startswith(asked):
            return len(asked)
        # The template writes earlier turns otherwise now, such as without their reasoning.
        begins = asked.removeprefix(self.template.render(before, tools=tools, asks=False))
        found = text.find(begins, after) if begins else -1
        if found < 0:
            raise ValueError(
                "the model's chat template does not begin an answer in a conversation as it does behind a prompt, so "
                "what the assistant says cannot be told from the rest; write each answer as a row of its own"
            )
        return found + len(begins)

    def _first_end(self, text: str, start: int) -> tuple[int, int]:
        """Where the first of the tokens that end answers begins and ends; where there is none, the text does."""
        ends = ((text.find(token, start), len(token)) for token in map(self.tokenizer.id_to_token, self.stop_token_ids))
        at, length = min(((at, length) for at, length in ends if at >= 0), default=(len(text), 0))
        return at, at + length

    def _encode(self, text: str) -> list[int]:
        """A template writes <bos> itself, or the model wants none."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def find_renderer(
    directory: Path, tokenizer: Any = None, *, arguments: Mapping[str, Any] = MappingProxyType({})
) -> ChatRenderer | None:
    """That of a model; None if it has no template.

    Raises:
        ValueError: if it has one that cannot be used.
    """
    return ChatRenderer.of_model(directory, tokenizer, arguments=arguments) if has_template(directory) else None


def _call_id(num_before: int, output_ids: Sequence[int], number: int) -> str:
    """Nothing random, so that a trial can be repeated; nine letters and digits, as Mistral's templates want them."""
    return hashlib.blake2s(f"{num_before} {list(output_ids)} {number}".encode()).hexdigest()[:9]
