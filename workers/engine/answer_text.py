"""The text of an answer, as SGLang gives it: output ids -> text, without what has stopped it.

output ids  ... 88 12 | 5 |          a stop token is left out, and other special tokens where they are skipped
                     v
text        "... yes" | "\\n\\nQuestion"       a stop string is left out, and what its last token has behind it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from corral.experiments.prompts.tokens import load_tokenizer
from corral.workers.engine.requests import FinishReason, StopFinish
from corral.workers.engine.sampling import SamplingParams


class DecodeText(Protocol):
    """Token ids -> text; any thread may call it."""

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


def text_decoder(directory: Path) -> DecodeText:
    """By the tokenizer of a model directory.

    Raises:
        ValueError: if its tokenizer.json cannot be used.
    """
    tokenizer = load_tokenizer(directory)

    def decode(token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    return decode


def answer_text(
    output_ids: Sequence[int], reason: FinishReason | None, sampling: SamplingParams, decode: DecodeText
) -> str:
    """The text of an answer that ended for `reason`.

    Example:
        answer_text([17, 4, 2], StopFinish(2), SamplingParams(), decode)        # decode([17, 4])
    """
    matched = reason.matched if isinstance(reason, StopFinish) else None
    if isinstance(matched, int) and not sampling.no_stop_trim:
        output_ids = output_ids[:-1]
    text = decode(output_ids, skip_special_tokens=sampling.skip_special_tokens)
    if isinstance(matched, str):
        before, found, _ = text.partition(matched)
        return before + found if sampling.no_stop_trim else before
    return text
