"""Ends an answer where its text has a stop string: newest token -> text of the last tokens -> the string, or None.

    output ids  ... 17 4 | 88 12 5 |     window of as many tokens as the longest string has bytes, and one more
                         v
    decoded text       "...\\n\\nQuestion"     contains "\\n\\n": the answer ends with the token that completed it

The window moves with every token, so a string is seen with its last token, and the tokens that spell it stay in the
output, as in SGLang. That one's window is of as many tokens as its tokenizer makes of the string, and one more: it can
miss a string that the model spells in smaller pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopStrings:
    """The stop strings of one request."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """decode: token ids -> text, special tokens included."""
        self._strings = strings
        self._decode = decode
        # A token stands for a byte at least. One more, since decoders may strip what the first token begins with.
        self._num_tokens = max(len(string.encode(errors="surrogatepass")) for string in strings) + 1

    def matched(self, output_ids: Sequence[int]) -> str | None:
        """The first of the strings that the end of the output has; to be asked after every token."""
        text = self._decode(output_ids[-self._num_tokens :])
        return next((string for string in self._strings if string in text), None)
