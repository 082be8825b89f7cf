"""LengthLimits: how long rows may be. Measured in tokens where a text alone could be too long."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from corral.experiments.prompts.messages import ToolSchema
from corral.experiments.prompts.row_prompts import Answer, Prompt, PromptEncoder

_SPECIAL_TOKENS = 4  # no tokenizer puts more around a text


@dataclass(frozen=True)
class LengthLimits:
    """How long the rows of a dataset may be, in tokens of a model. Reads its tokenizer when a row could be too long.

    Example:
        limits = LengthLimits(model, max_prompt_tokens=1024)
        limits.find_excess(prompt)            # "", or "the prompt has 1100 tokens, more than ..."
    """

    model: Path
    """Directory with the tokenizer, and the template of messages."""
    _: KW_ONLY
    max_prompt_tokens: int
    """Of the prompt, special tokens included."""
    max_row_tokens: int | None = None
    """Of all sequences of a row together, each a prompt, an answer and its end: they share a micro-batch. None where
    answers are not trained on."""
    max_sequence_tokens: int | None = None
    """Of each of these sequences; None where the model does not say how many positions it has."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """As those of `PromptEncoder`."""

    def find_excess(self, prompt: Prompt, answers: Sequence[Answer] = (), *, tools: Sequence[ToolSchema] = ()) -> str:
        """What of a row is too long; empty if nothing is.

        Raises:
            ValueError: if the tokenizer cannot be used, or the model's template cannot for these messages.
        """
        if isinstance(prompt, str) and prompt and _at_most(prompt) <= self.max_prompt_tokens:
            at_most = [_at_most(prompt) + _at_most(answer) for answer in answers if isinstance(answer, str)]
            if len(at_most) == len(answers) and not self._excess_of_row(at_most):
                return ""
        if prompt and (excess := self._excess_of_prompt(prompt, tools=tools)):
            return excess
        if self.max_row_tokens is None:
            return ""
        learned = [self.prompts.encode_learned(prompt, answer, tools=tools) for answer in answers]
        if excess := self._excess_of_row([len(one.ids) for one in learned]):
            lengths = " and ".join(f"{sum(one.is_given)} + {len(one.ids) - sum(one.is_given)}" for one in learned)
            return f"prompt and answer have {lengths} tokens, more than {excess}"
        return ""

    def _excess_of_prompt(self, prompt: Prompt, *, tools: Sequence[ToolSchema]) -> str:
        num_prompt = len(self.prompts.encode(prompt, tools=tools))
        if num_prompt <= self.max_prompt_tokens:
            return ""
        return f"the prompt has {num_prompt} tokens, more than max_prompt_tokens {self.max_prompt_tokens}"

    def _excess_of_row(self, num_tokens: Sequence[int]) -> str:
        """The limit that a row with these sequences breaks; empty if none."""
        if self.max_row_tokens is not None and sum(num_tokens) > self.max_row_tokens:
            return f"max_tokens_per_micro_batch {self.max_row_tokens}"
        if self.max_sequence_tokens is not None and max(num_tokens, default=0) > self.max_sequence_tokens:
            return f"the model's max_position_embeddings {self.max_sequence_tokens}"
        return ""

    @cached_property
    def prompts(self) -> PromptEncoder:
        """What tokens are made by."""
        return PromptEncoder(self.model, self.template_arguments)


def _at_most(text: str) -> int:
    """As many tokens as a text can have, for nearly nothing: each stands for a byte at least, or is a special one."""
    return len(text.encode(errors="surrogatepass")) + _SPECIAL_TOKENS
