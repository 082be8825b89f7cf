"""The prompt of a row as token ids, whatever it is: the one place that says so, for all who ask a model.

"12+34="                                 ──tokens.encode_prompt──► [<bos>] ids
[{"role": "user", "content": "12+34="}]  ──the model's own chat template──► ids     what the template says of <bos>
[2, 17, 18]                              ──────────────────────────────────► the same
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from corral.experiments.prompts.messages import Message, ToolSchema
from corral.experiments.prompts.tokens import encode_prompt, load_tokenizer

if TYPE_CHECKING:
    from corral.experiments.prompts.chat import ChatRenderer

Prompt = str | Sequence[Message] | Sequence[int]


@dataclass
class PromptEncoder:
    """Of one model. Reads what it needs when it needs it: a model without a chat template has prompts as text.

    Example:
        PromptEncoder(directory).encode(row.prompt, tools=row.tools)
    """

    directory: Path
    """Of the model."""

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.directory)

    @cached_property
    def chat(self) -> "ChatRenderer":
        from corral.experiments.prompts.chat import ChatRenderer  # only who renders messages pays for Jinja

        return ChatRenderer.of_model(self.directory, self.tokenizer)

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
        ids, size = list(prompt), self.tokenizer.get_vocab_size()
        if unknown := [token for token in ids if not 0 <= token < size]:
            raise ValueError(
                f"the prompt has token id {unknown[0]}, and the tokenizer of {self.directory} has those below {size}; "
                "encode prompts with the tokenizer of the model that is trained"
            )
        return ids


def is_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Whether it is a list of token ids with at least one."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(type(token) is int for token in prompt)
