"""The prompt of a row as token ids, whatever it is: the one place that says so, for all who ask a model.

"12+34="                                 ──tokens.encode_prompt──► [<bos>] ids
[{"role": "user", "content": "12+34="}]  ──the model's own chat template──► ids     what the template says of <bos>
[2, 17, 18]                              ──────────────────────────────────► the same

What is learned of a row comes from here, too: a prompt and an answer in one sequence, and which tokens were given.

"12+34=", "46"      ──► prompt ids, answer ids, end of answer           given: the prompt
messages, messages  ──the template, the whole conversation──► ids       given: all but what the assistant says
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from corral.experiments.prompts.messages import Message, ToolSchema
from corral.experiments.prompts.tokens import (
    encode_answer,
    encode_prompt,
    end_of_answer_id,
    eos_token_ids,
    load_tokenizer,
    vocabulary_size,
)
from corral.scheduling.errors import RuleError

if TYPE_CHECKING:
    from corral.experiments.prompts.chat import ChatRenderer

Prompt = str | Sequence[Message] | Sequence[int]
Answer = str | Sequence[Message]


class LearnedSequence(NamedTuple):
    """One sequence that something is learned of."""

    ids: list[int]
    is_given: list[bool]
    """Of each token: nothing is learned of it."""


@dataclass
class PromptEncoder:
    """Of one model. Reads what it needs when it needs it: a model without a chat template has prompts as text.

    Example:
        PromptEncoder(directory).encode(row.prompt, tools=row.tools)
    """

    directory: Path
    """Of the model."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """`dataset.chat_template_kwargs`."""

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.directory)

    @cached_property
    def chat(self) -> "ChatRenderer":
        from corral.experiments.prompts.chat import ChatRenderer  # only who renders messages pays for Jinja

        return ChatRenderer.of_model(self.directory, self.tokenizer, arguments=self.template_arguments)

    def encode_within(self, max_tokens: int, prompt: Prompt, *, tools: Sequence[ToolSchema] = ()) -> list[int]:
        """As `encode`; ValueError, too, if it has more tokens."""
        ids = self.encode(prompt, tools=tools)
        if len(ids) > max_tokens:
            limit = f"dataset.max_prompt_tokens {max_tokens}"
            raise RuleError(f"the prompt has {len(ids)} tokens, more than {limit}", "shorten it")
        return ids

    def encode(self, prompt: Prompt, *, tools: Sequence[ToolSchema] = ()) -> list[int]:
        """
        Raises:
            ValueError: if the model has no template for messages, its template refuses them, or it has no such ids.
        """
        if isinstance(prompt, str):
            return encode_prompt(self.tokenizer, prompt)
        if not is_ids(prompt):
            messages: Any = prompt
            return self.chat.render(messages, tools=tools)
        return self._known(prompt)

    def encode_learned(self, prompt: Prompt, answer: Answer, *, tools: Sequence[ToolSchema] = ()) -> LearnedSequence:
        """A prompt with an answer to it.

        Args:
            answer: text, which goes on from a text or ids, and is what the assistant says to messages; or messages.

        Raises:
            ValueError: as `encode`; or if messages follow what is none.
        """
        if prompt and (isinstance(prompt, str) or is_ids(prompt)):
            if not isinstance(answer, str):
                raise RuleError("the answer is messages, and the prompt is none", "write both in the same way")
            given = self.encode(prompt)
            ids = [*given, *encode_answer(self.tokenizer, answer), self.end_of_answer]
            return LearnedSequence(ids, [place < len(given) for place in range(len(ids))])
        before: Any = prompt
        answers: Any = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        ids, is_learned = self.chat.render_learned([*before, *answers], tools=tools, num_given=len(before))
        return LearnedSequence(ids, [not one for one in is_learned])

    @cached_property
    def vocabulary_size(self) -> int:
        """Token ids are below it."""
        return vocabulary_size(self.directory, self.tokenizer)

    @cached_property
    def answer_ends(self) -> tuple[int, ...]:
        """The ids that end an answer: those that the model declares, and what its chat template writes behind one."""
        try:
            return self.chat.stop_token_ids
        except ValueError:  # without a template that can be used, nobody chats
            return eos_token_ids(self.directory)

    @cached_property
    def end_of_answer(self) -> int:
        """What an answer to a text is taught to end with."""
        return end_of_answer_id(self.directory, self.tokenizer)

    def _known(self, prompt: Sequence[int]) -> list[int]:
        ids, size = list(prompt), self.vocabulary_size
        if unknown := [token for token in ids if not 0 <= token < size]:
            raise RuleError(
                f"the prompt has token id {unknown[0]}, and model {self.directory} has those below {size}",
                "encode prompts with the tokenizer of the model that is trained",
            )
        return ids


def is_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Whether it is a list of token ids with at least one."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(type(token) is int for token in prompt)
