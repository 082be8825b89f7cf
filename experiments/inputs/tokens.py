"""Text and token ids of a model directory, without torch: the one place that says how prompts and answers are encoded.

prompt ──► [<bos>] prompt tokens        as the model's tokenizer begins a text
answer ──► answer tokens, end of answer nothing in between: the answer continues the prompt
"""

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.experiments.inputs.regular_file import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL_TOKENS = 4  # no tokenizer puts more around a text


def load_tokenizer(directory: Path) -> "Tokenizer":
    """The `tokenizers.Tokenizer` of a model directory.

    Raises:
        ValueError: if its tokenizer.json cannot be used.
    """
    from tokenizers import Tokenizer  # only who encodes something pays for it

    path = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(f"cannot use the tokenizer {path}: {error}; download it again") from error


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """With the special tokens that the tokenizer gives to a text of its own, such as <bos>."""
    return list(tokenizer.encode(prompt).ids)


def encode_answer(tokenizer: Any, answer: str) -> list[int]:
    """Without special tokens: a <bos> between prompt and answer would be learned as part of every answer."""
    return list(tokenizer.encode(answer, add_special_tokens=False).ids)


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Every id that ends an answer, as generation_config.json and then config.json name them.

    Raises:
        ValueError: if the model names none.
    """
    declared = [_read(directory / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    listed = [value for entry in declared for value in (entry if isinstance(entry, list) else [entry])]
    ids = dict.fromkeys(value for value in listed if isinstance(value, int) and not isinstance(value, bool))
    if not ids:
        raise ValueError(f"model {directory} names no eos_token_id in generation_config.json or config.json; add one")
    return tuple(ids)


def end_of_answer_id(directory: Path, tokenizer: Any) -> int:
    """The id that answers are taught to end with: the tokenizer's eos_token where the model ends there, else the first.

    A model may name several: an end of turn and an end of text, or its padding.

    Raises:
        ValueError: if the model names none.
    """
    ids = eos_token_ids(directory)
    named = _read(directory / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    own = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return own if own in ids else ids[0]


@dataclass(frozen=True)
class LengthLimits:
    """How long the rows of a dataset may be, in tokens of a model. Reads its tokenizer when a row could be too long.

    Example:
        limits = LengthLimits(model, max_prompt_tokens=1024)
        limits.find_excess(prompt)            # "", or "the prompt has 1100 tokens, more than ..."
    """

    model: Path
    """Directory with the tokenizer."""
    _: KW_ONLY
    max_prompt_tokens: int
    """Of the prompt, special tokens included."""
    max_row_tokens: int | None = None
    """Of all sequences of a row together, each a prompt, an answer and its end: they share a micro-batch. None where
    answers are not trained on."""
    max_sequence_tokens: int | None = None
    """Of each of these sequences; None where the model does not say how many positions it has."""

    def find_excess(self, prompt: str, answers: Sequence[str] = ()) -> str:
        """What of a row is too long; empty if nothing is.

        Raises:
            ValueError: if the tokenizer cannot be used.
        """
        at_most = [_at_most(prompt) + _at_most(answer) for answer in answers]
        if _at_most(prompt) <= self.max_prompt_tokens and not self._excess_of_row(at_most):
            return ""
        num_prompt = len(encode_prompt(self._tokenizer, prompt))
        if num_prompt > self.max_prompt_tokens:
            return f"the prompt has {num_prompt} tokens, more than max_prompt_tokens {self.max_prompt_tokens}"
        num_tokens = [len(encode_answer(self._tokenizer, answer)) + 1 for answer in answers]
        if excess := self._excess_of_row([num_prompt + num for num in num_tokens]):
            sequences = " and ".join(f"{num_prompt} + {num}" for num in num_tokens)
            return f"prompt and answer have {sequences} tokens, more than {excess}"
        return ""

    def _excess_of_row(self, num_tokens: Sequence[int]) -> str:
        """The limit that a row with these sequences breaks; empty if none."""
        if self.max_row_tokens is not None and sum(num_tokens) > self.max_row_tokens:
            return f"max_tokens_per_micro_batch {self.max_row_tokens}"
        if self.max_sequence_tokens is not None and max(num_tokens, default=0) > self.max_sequence_tokens:
            return f"the model's max_position_embeddings {self.max_sequence_tokens}"
        return ""

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self.model)


def _at_most(text: str) -> int:
    """As many tokens as a text can have, for nearly nothing: each stands for a byte at least, or is a special one."""
    return len(text.encode(errors="surrogatepass")) + _SPECIAL_TOKENS


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}
