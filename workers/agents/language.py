"""ModelLanguage: between words and the tokens of one model: text by its tokenizer, messages by its chat template.

text ────► tokens as they are, behind the history
messages ─► answered: what the template writes behind the answer ──► the history goes on
             └── the template would now write what was said in another way ──► the conversation, rendered anew
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from corral.experiments.prompts.row_prompts import is_ids
from corral.experiments.prompts.tokens import answer_text, encode_answer, encode_prompt, is_longer, longest_text
from corral.workers.agents.contract import EpisodeEndedError, Message, ToolCall, Turn, Words

if TYPE_CHECKING:
    from corral.experiments.prompts.chat import ChatRenderer  # whose Jinja only the process of agents needs


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model has made."""

    number: int
    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    versions: Sequence[tuple[str, int, int]] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """Where a session may go on from."""

    history: Sequence[int]
    conversation: Sequence[Message] | None
    """The same as messages; None if nobody knows them."""
    last: Turn | None = None
    """The answer that it ends with."""


class ModelLanguage:
    """Of one model."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Collection[int],
        renderer: "ChatRenderer | None",
        max_tokens: int | None = None,
    ) -> None:
        """
        Args:
            max_tokens: of a sequence; None knows no limit.
            tokenizer: of `tokenizers`.
            stop_token_ids: a last token that is one of them is not part of an answer's text.
            renderer: None for a model without a chat template, to which messages cannot be said.
        """
        self._tokenizer, self._renderer = tokenizer, renderer
        self._longest_text = None if max_tokens is None else longest_text(tokenizer, max_tokens)
        self._stop_token_ids = frozenset((*stop_token_ids, *self.ends))

    def go_on(self, point: Point, words: Words, *, tools: Sequence[Mapping[str, Any]]) -> Point:
        """Behind some words; with another history where the model's template writes what was said in another way now.

        Text in the middle of a sequence has no special tokens.

        Raises:
            EpisodeEndedError: if the words are longer than a sequence; nobody makes tokens of them then.
            ValueError: for messages, if the model has no template, or nobody knows what was said before in messages.
        """
        if self._longest_text is not None and is_longer(words, self._longest_text):
            raise EpisodeEndedError("length", f"no sequence has room for more than {self._longest_text} characters")
        history, known = point.history, point.conversation
        if isinstance(words, str):
            ids = encode_answer(self._tokenizer, words) if history else encode_prompt(self._tokenizer, words)
            return Point([*history, *ids], None)
        if is_ids(words):
            return Point([*history, *words], None)
        messages = [word for word in words if isinstance(word, Mapping)]
        if self._renderer is None:
            raise ValueError("messages need a model with a chat template, and this one has none; say text")
        conversation = None if history and known is None else [*(known or ()), *messages]
        if point.last is not None:
            stopped = point.last.finish_reason == "stop"
            gone_on = self._renderer.bridge(
                history, stopped=stopped, messages=messages, tools=tools, history=known or ()
            )
            if gone_on is not None:
                return Point(gone_on, conversation)
        if conversation is None:
            raise ValueError(
                "the model's chat template cannot go on from what was said as text or token ids; begin with messages, "
                "or in a branch with history=[]"
            )
        return Point(self._renderer.render(conversation, tools=tools), conversation)

    @property
    def ends(self) -> Sequence[int]:
        """What the template writes behind an answer, where the model does not say so."""
        return () if self._renderer is None else self._renderer.stop_token_ids

    def read(self, reply: Reply, *, tools: Sequence[Mapping[str, Any]], num_before: int) -> tuple[Turn, Message]:
        """The answer, with its calls as the template writes them; and the same as a part of a conversation."""
        ids, stopped = reply.ids, reply.finish_reason == "stop"
        text = answer_text(self._tokenizer, ids, ends=self._stop_token_ids)
        calls: Sequence[ToolCall] = ()
        message: Message = {"role": "assistant", "content": text}
        if self._renderer is not None:
            answer = self._renderer.parse(ids, stopped=stopped, tools=tools, num_before=num_before)
            calls, message = answer.tool_calls, answer.as_message()
        turn = Turn(reply.number, text, ids, reply.logprobs, reply.finish_reason, calls, reply.versions)
        return turn, message
