"""TextLanguage: words and tokens of a model by its tokenizer alone, as data sets have them: plain text."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from corral.experiments.inputs.tokens import encode_answer, encode_prompt
from corral.workers.agents.contract import ToolCall, Words


class TextLanguage:
    """A `Language` without conversations: messages and tools need a chat template."""

    def __init__(self, tokenizer: Any, *, stop_token_ids: Collection[int]) -> None:
        """
        Args:
            tokenizer: of `tokenizers`.
            stop_token_ids: a last token that is one of them is not part of an answer's text.
        """
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)

    def encode(
        self, words: Words, *, before: Sequence[int], stopped: bool, tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Text in the middle of a sequence has no special tokens.

        Raises:
            ValueError: for messages.
        """
        if isinstance(words, str):
            return encode_answer(self._tokenizer, words) if before else encode_prompt(self._tokenizer, words)
        ids = [word for word in words if isinstance(word, int)]
        if len(ids) < len(words):
            raise ValueError("messages need a model with a chat template, and this one has none; say text")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        ended = len(ids) > 0 and ids[-1] in self._stop_token_ids
        text: str = self._tokenizer.decode(list(ids[:-1] if ended else ids))
        return text

    def calls(self, ids: Sequence[int], *, stopped: bool, tools: Sequence[Mapping[str, Any]]) -> Sequence[ToolCall]:
        """None: nothing says how the text of a call looks."""
        return ()
