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
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from corral.experiments.prompts.chat_template import (
    ASKED,
    CALLS,
    CONTENT,
    REASONING,
    RESULTS,
    SEVERAL_CALLS,
    TOOLS,
    ChatTemplate,
    ToolCallForm,
    around_answer,
    end_of_call,
    has_template,
    reasoning_marks,
    stand_in_for,
    tool_call_form,
    unwritten,
)
from corral.experiments.prompts.messages import Message, ToolSchema, plain_messages, with_text_arguments
from corral.experiments.prompts.tokens import encode_answer, eos_token_ids, first_index, load_tokenizer
from corral.experiments.prompts.tool_calls import ToolCall
from corral.scheduling.errors import RuleError

_OTHER = "\ue000"  # of no text
_ALONE = "write each answer as a row of its own"


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """An answer of the model, taken apart."""

    content: str
    """The text of the answer, without its reasoning and its calls."""
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
    unwritten: frozenset[str] = frozenset()
    """What the template leaves out of a conversation."""

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
        stops, added = dict.fromkeys(ends), tokenizer.get_added_tokens_decoder()
        behind = encode_answer(tokenizer, around_answer(template)[1])
        if behind and behind[0] in added and not stops.keys() & set(behind):
            stops[behind[0]] = None
        if stops.keys() & set(behind):  # so that answers with calls end with a token of their own as well
            behind = encode_answer(tokenizer, end_of_call(template).rstrip())
            if behind and behind[-1] in added and not stops.keys() & set(behind):
                stops[behind[-1]] = None
        reasoning = reasoning_marks(template)
        return cls(
            template,
            tokenizer,
            tuple(stops),
            tool_calls=tool_call_form(template, ends=[tokenizer.id_to_token(stop) for stop in stops]),
            reasoning=reasoning,
            begins_reasoning=reasoning is not None and template.render([ASKED]).rstrip().endswith(reasoning[0]),
            unwritten=unwritten(template),
        )

    @property
    def lacks_for_tools(self) -> str:
        """Why a model never sees the tools, or its calls are not found; empty if all is well."""
        if TOOLS in self.unwritten:
            return "the model's chat template shows no tools"
        return "" if self.tool_calls else "the model's chat template writes calls in no form that is known"

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> list[int]:
        """A conversation from its beginning, up to where the model is to answer; behind what it says already, if the
        last message is the assistant's.

        Raises:
            ValueError: if the template refuses it, or leaves something of it out.
        """
        return self._encode(self._asked(plain_messages(messages), tools=tools))

    def render_learned(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), num_given: int = 0
    ) -> tuple[list[int], list[bool]]:
        """A whole conversation, and of each token whether the assistant says it: from behind what the template begins
        an answer with to the token that ends it, which a model has to learn to say as well.

        Args:
            num_given: messages at its beginning that nothing is learned of. If the last of them is the assistant's, and
                the next one, too, this goes on with its text.

        Raises:
            ValueError: if the template refuses it, or does not write down what the assistant says where it is to.
        """
        plain = plain_messages(messages)
        given = ""
        if 0 < num_given < len(plain) and _may_go_on(plain[num_given - 1]) and plain[num_given]["role"] == "assistant":
            begun, goes_on = plain[num_given - 1 : num_given + 1]
            given = self._asked(plain[:num_given], tools=tools)
            plain[num_given - 1 : num_given + 1] = [
                {**begun, **goes_on, "content": begun["content"] + goes_on["content"]}
            ]
            num_given -= 1
        self._check_written(plain, tools)
        text = self.template.render(plain, tools=tools, asks=False)
        if not text.startswith(given):
            raise RuleError("the model's chat template does not go on from what the prompt begins", "leave it out")
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        ids, tokens = list(encoding.ids), list(zip(encoding.ids, encoding.offsets, strict=True))
        spans, end = list[tuple[int, int]](), 0
        for number, message in enumerate(plain[num_given:], num_given):
            if message["role"] != "assistant":
                continue
            first, last = self._span_of(text, plain, number, tools=tools)
            asked = self.template.render(plain[:number], tools=tools)
            start = len(asked)
            if not text.startswith(asked):
                # The template writes earlier turns otherwise now, such as without their reasoning.
                begins = asked.removeprefix(self.template.render(plain[:number], tools=tools, asks=False))
                found = text.rfind(begins, end, first) if begins else -1
                if found < 0:
                    raise RuleError(
                        "the model's chat template does not begin an answer in a conversation as it does behind a "
                        "prompt, so what the assistant says cannot be told from the rest",
                        _ALONE,
                    )
                start = found + len(begins)
            bound = self._span_of(text, plain, number + 1, tools=tools)[0] if number + 1 < len(plain) else len(text)
            behind = [(token, span) for token, span in tokens if span[1] > last and span[0] < bound]
            ends = [span for token, span in behind if token in self.stop_token_ids]
            # Where an answer of the history ends otherwise than the last one, it is with a mark of the same kind.
            ends += [span for token, span in behind if token in self.tokenizer.get_added_tokens_decoder()]
            if not ends and number + 1 < len(plain):
                raise RuleError("the model's chat template ends an answer with no token of its own", _ALONE)
            if not ends:  # The last answer ends with what a next message begins with.
                following = ASKED
                for call in message.get("tool_calls", ()):
                    name, call_id = call["function"]["name"], call.get("id", "")
                    following = {"role": "tool", "tool_call_id": call_id, "name": name, "content": CONTENT}
                longer = self.template.render([*plain, following], tools=tools, asks=False).removeprefix(text)
                next_ids = self._encode(longer)
                ids.append(next((token for token in next_ids if token in self.stop_token_ids), self.stop_token_ids[0]))
            end = ends[0][1] if ends else len(text)
            if not _is_rendered(message, text[start:end]):
                raise RuleError(f"the model's chat template does not write what messages[{number}] says", "change it")
            spans.append((max(start, len(given)), end))
        # A token of both, what stands before an answer and what is said, is one that the prompt would not end with.
        is_learned = [any(start <= first < end for start, end in spans) for _, (first, _) in tokens]
        return ids, is_learned + [True] * (len(ids) - len(is_learned))

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
        begin, end = self.reasoning or ("", "")
        sampled = self._decode(ids) if self.reasoning is not None else ""
        if not stopped and sampled.rfind(begin) > sampled.rfind(end):
            return None  # reasoning is begun, which the template would close
        if history:
            *before, answer = plain_messages(history)
        else:  # A conversation that has reasoning if this one has, anywhere.
            before, answer = [ASKED], {"role": "assistant", "content": CONTENT}
            if end and end in sampled:
                answer["reasoning_content"] = REASONING
        asked = self.template.render(before, tools=tools)
        stand_in = stand_in_for(answer)
        following = plain_messages(messages) if messages else []
        text = self._asked([*before, stand_in, *following], tools=tools, continues=bool(following))
        if history and not _is_rendered(answer, self.template.render([*before, answer, *following], tools=tools)):
            return None  # the template leaves out some of it, such as thoughts that it knows and nobody else does
        answer_end = first_index(text, map(self.tokenizer.id_to_token, self.stop_token_ids), len(asked))
        if not text.startswith(asked) or answer_end == len(text):
            return None
        rendered = text[len(asked) : answer_end]
        if any(mark in stand_in.values() and mark not in rendered for mark in (CONTENT, REASONING)):
            return None
        if self.reasoning is not None:
            begun = asked.removeprefix(self.template.render(before, tools=tools, asks=False)) if history else ""
            if (end in rendered) != (end in (sampled.rpartition(begun)[2] if begun else sampled)):
                return None  # a block without any reasoning, which the template leaves out or puts in
        behind = self._encode(text[answer_end:])
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
        calls = list[ToolCall]()
        for number, call in enumerate(found):
            # Not random, so that a trial can be repeated; nine letters and digits, as Mistral's templates want them.
            made_of = f"{num_before} {list(output_ids)} {number}"
            calls.append(replace(call, id=call.id or hashlib.blake2s(made_of.encode()).hexdigest()[:9]))
        return AssistantMessage(content, reasoning, tuple(calls), text)

    def _without_reasoning(self, text: str) -> tuple[str, str]:
        """(reasoning, the rest). One that is not closed was cut, and nothing comes after it."""
        if self.reasoning is None:
            return "", text
        begin, end = self.reasoning
        thought, closes, rest = text.partition(end)
        if not self.begins_reasoning and not text.lstrip().startswith(begin):
            mark = self.tool_calls.begin if self.tool_calls is not None else ""
            if not closes or (mark and mark in thought):
                return "", text  # nothing ends it, or an argument of a call does
        return thought.lstrip().removeprefix(begin).strip("\n"), rest.lstrip("\n")

    def _asked(self, plain: list[dict[str, Any]], *, tools: Sequence[ToolSchema], continues: bool = True) -> str:
        """A conversation up to where the model is to say something; raises as `render`.

        Args:
            continues: whether it goes on with the last message, if that is the assistant's.
        """
        self._check_written(plain, tools)
        *before, last = plain
        if not continues or not _may_go_on(last):
            return self.template.render(plain, tools=tools)
        text = self.template.render(
            [*before, {**last, "content": last["content"] + CONTENT + " "}], tools=tools, asks=False
        )
        begun, is_written, behind = text.rpartition(CONTENT)
        if not is_written:
            raise RuleError("the model's chat template does not write what the last message begins", "leave it out")
        return begun if behind.startswith(" ") else begun.rstrip()

    def _check_written(self, plain: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        num_calls = max((len(message.get("tool_calls", ())) for message in plain), default=0)
        has = {
            CALLS: num_calls > 0,
            SEVERAL_CALLS: num_calls > 1,
            RESULTS: any(message["role"] == "tool" for message in plain),
            TOOLS: bool(tools),
        }
        for what, is_there in has.items():
            if is_there and what in self.unwritten:
                raise RuleError(
                    f"the model's chat template does not write {what}", "leave them out, or use another model"
                )

    def _span_of(
        self, text: str, plain: list[dict[str, Any]], number: int, *, tools: Sequence[ToolSchema]
    ) -> tuple[int, int]:
        """Where in a conversation stands what a message says, and its calls: where the text differs from that with
        other words in their place."""
        message = {
            **plain[number],
            "content": _OTHER if plain[number]["content"] or not plain[number].get("tool_calls") else "",
        }
        if "tool_calls" in message:
            function = {"name": _OTHER, "arguments": {_OTHER: _OTHER}}
            message["tool_calls"] = [{**call, "function": function} for call in message["tool_calls"]]
        other = self.template.render([*plain[:number], message, *plain[number + 1 :]], tools=tools, asks=False)
        first = len(os.path.commonprefix([text, other]))
        return first, max(first, len(text) - len(os.path.commonprefix([text[::-1], other[::-1]])))

    def _encode(self, text: str) -> list[int]:
        """A template writes <bos> itself, or the model wants none."""
        return encode_answer(self.tokenizer, text)

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


def _may_go_on(message: Message) -> bool:
    """Whether a message is the beginning of what the assistant says, where it is the last one of a prompt."""
    return message["role"] == "assistant" and not message.get("tool_calls")


def _is_rendered(message: Message, text: str) -> bool:
    """Whether a text has what a message says, reasoning aside, and the names of what it calls."""
    parts = [
        message["content"].rpartition("</think>")[2],
        *(call["function"]["name"] for call in message.get("tool_calls", ())),
    ]
    return all(one.strip() in text for one in parts)
