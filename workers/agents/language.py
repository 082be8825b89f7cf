"""ModelLanguage: between words and the tokens of one model: text by its tokenizer, messages by its chat template.

text ────► tokens as they are, behind the history
messages ─► answered: what the template writes behind the answer ──► the history goes on
             └── the template would now write what was said in another way ──► the conversation, rendered anew
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corral.experiments.prompts.row_prompts import is_ids
from corral.experiments.prompts.tokens import encode_answer, encode_prompt
from corral.workers.agents.contract import Message, ToolCall, Turn, Words

if TYPE_CHECKING:
    from corral.experiments.prompts.chat import ChatRenderer  # whose Jinja only the process of agents needs


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, read."""

    text: str
    """Without the token that ended it."""
    tool_calls: Sequence[ToolCall]
    message: Message
    """As a part of a conversation."""


class ModelLanguage:
    """Of one model."""

    def __init__(self, tokenizer: Any, *, stop_token_ids: Collection[int], renderer: "ChatRenderer | None") -> None:
        """
        Args:
            tokenizer: of `tokenizers`.
            stop_token_ids: a last token that is one of them is not part of an answer's text.
            renderer: None for a model without a chat template, to which messages cannot be said.
        """
        self._tokenizer, self._renderer = tokenizer, renderer
        self._stop_token_ids = frozenset((*stop_token_ids, *self.ends))

    def go_on(
        self,
        history: Sequence[int],
        words: Words,
        *,
        last: Turn | None,
        conversation: Sequence[Message] | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """A history with words behind it; another one where the model's template writes what was said in another way
        now. Text in the middle of a sequence has no special tokens.

        Args:
            last: the answer that the history ends with.
            conversation: what it says, as messages; None if nobody knows.

        Raises:
            ValueError: for messages, if the model has no template, or nobody knows what was said before in messages.
        """
        if isinstance(words, str):
            ids = encode_answer(self._tokenizer, words) if history else encode_prompt(self._tokenizer, words)
            return [*history, *ids]
        if not words or is_ids(words):
            return [*history, *(word for word in words if isinstance(word, int))]
        messages = [word for word in words if isinstance(word, Mapping)]
        if self._renderer is None:
            raise ValueError("messages need a model with a chat template, and this one has none; say text")
        if last is not None:
            before = conversation or ()
            gone_on = self._renderer.bridge(
                history, stopped=last.finish_reason == "stop", messages=messages, tools=tools, history=before
            )
            if gone_on is not None:
                return gone_on
        if history and conversation is None:
            raise ValueError(
                "the model's chat template cannot go on from what was said as text or token ids; begin with messages, "
                "or in a branch with history=[]"
            )
        return self._renderer.render([*(conversation or ()), *messages], tools=tools)

    @property
    def ends(self) -> Sequence[int]:
        """What the template writes behind an answer, where the model does not say so."""
        return () if self._renderer is None else self._renderer.stop_token_ids

    def read(self, ids: Sequence[int], *, stopped: bool, tools: Sequence[Mapping[str, Any]], num_before: int) -> Said:
        """The answer, and what its calls are as the template writes them."""
        ended = len(ids) > 0 and ids[-1] in self._stop_token_ids
        text: str = self._tokenizer.decode(list(ids[:-1] if ended else ids))
        if self._renderer is None:
            return Said(text, (), {"role": "assistant", "content": text})
        answer = self._renderer.parse(ids, stopped=stopped, tools=tools, num_before=num_before)
        calls = [ToolCall(call.name, json.loads(call.arguments), call.id) for call in answer.tool_calls]
        return Said(text, calls, answer.as_message())
