"""Text and token ids of a model directory, without torch: the one place that says how prompts and answers are encoded.

prompt ──► [<bos>] prompt tokens        as the model's tokenizer begins a text
answer ──► answer tokens, end of answer nothing in between: the answer continues the prompt
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.experiments.regular_file import read_regular
from corral.scheduling.errors import RuleError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BLANK = "\u2581"  # what sentencepiece writes for a blank
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SHOWN_BYTES = (*range(33, 127), *range(161, 173), *range(174, 256))  # stand for themselves in vocabularies of bytes
_BYTE_BY_CHARACTER = {chr(byte): byte for byte in _SHOWN_BYTES} | {
    chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)} - {*_SHOWN_BYTES}))
}
_LONG_TEXT = 2**16  # characters


def load_tokenizer(directory: Path) -> "Tokenizer":
    """The `tokenizers.Tokenizer` of a model directory, without the truncation and padding that were saved with it:
    these are settings of the last caller that encoded a batch, and transformers leaves them aside, too.

    Raises:
        ValueError: if its tokenizer.json cannot be used.
    """
    from tokenizers import Tokenizer  # only who encodes something pays for it

    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise RuleError(f"cannot use the tokenizer {path}: {error}", "download it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """With the special tokens that the tokenizer gives to a text of its own, such as <bos>.

    Raises:
        ValueError: if the text has the first of them already, as what a chat template has written does.
    """
    encoding = encoded(tokenizer, prompt, add_special_tokens=True)
    ids, is_added = encoding.ids, encoding.special_tokens_mask
    if len(ids) > 1 and ids[0] == ids[1] and is_added[0]:
        raise RuleError(
            f"the prompt begins with {tokenizer.id_to_token(ids[0])}, which the tokenizer puts before every text, so "
            "that it would be there twice",
            "remove it from the text, or write the prompt as messages",
        )
    return list(ids)


def encode_answer(tokenizer: Any, answer: str) -> list[int]:
    """Without special tokens: a <bos> between prompt and answer would be learned as part of every answer."""
    return list(encoded(tokenizer, answer).ids)


def encoded(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> Any:
    """The `tokenizers.Encoding` of a text; a long one is encoded without Python's lock, so that other threads go on."""
    if len(text) > _LONG_TEXT:
        return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def longest_text(tokenizer: Any, max_tokens: int) -> int:
    """The characters that so many tokens stand for at most."""
    return max_tokens * max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)


def is_longer(asked: object, most: int) -> bool:
    """Whether a text, or all texts in a list or mapping of any depth, have more characters than `most`."""
    left, size = [asked], 0
    while left and size <= most:
        one = left.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping | list | tuple):
            left += one.values() if isinstance(one, Mapping) else one
    return size > most


def answer_text(tokenizer: Any, ids: Sequence[int], *, ends: Collection[int] = ()) -> str:
    """The text of an answer: all of its tokens, special ones and a first blank too, without the one that ended it."""
    ids = list(ids[:-1] if ids and ids[-1] in ends else ids)
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    first = (tokenizer.id_to_token(ids[0]) or "") if ids else ""
    # Decoders of sentencepiece drop the blank that a text begins with, and an answer is no beginning.
    num_blanks = len(first) - len(first.lstrip(_BLANK))
    return text if text.startswith(" " * num_blanks) else f" {text}"


def first_index(text: str, marks: Iterable[str], start: int = 0) -> int:
    """Where the first of some marks begins in a text; the end of the text if it has none of them."""
    return min((at for mark in marks if (at := text.find(mark, start)) >= 0), default=len(text))


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of one token, which may be a part of a character."""
    text = answer_text(tokenizer, [token])
    written = tokenizer.id_to_token(token) or ""
    if "\ufffd" not in text:
        return text.encode()
    if by_number := _BYTE.fullmatch(written):
        return bytes([int(by_number[1], 16)])
    known = [_BYTE_BY_CHARACTER.get(character) for character in written]
    return bytes(byte for byte in known if byte is not None) if None not in known else text.encode()


def vocabulary_size(directory: Path, tokenizer: Any) -> int:
    """How many token ids a model has, those that its tokenizer has no text for included: it may say any of them."""
    config = read_settings(directory / "config.json")
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else int(tokenizer.get_vocab_size())


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Every id that ends an answer, as generation_config.json and then config.json name them.

    Raises:
        ValueError: if the model names none.
    """
    files = ("generation_config.json", "config.json")
    declared = [read_settings(directory / name).get("eos_token_id") for name in files]
    listed = [value for entry in declared for value in (entry if isinstance(entry, list) else [entry])]
    ids = dict.fromkeys(value for value in listed if isinstance(value, int) and not isinstance(value, bool))
    if not ids:
        raise RuleError(f"model {directory} names no eos_token_id in generation_config.json or config.json", "add one")
    return tuple(ids)


def end_of_answer_id(directory: Path, tokenizer: Any) -> int:
    """The id that answers are taught to end with: the tokenizer's eos_token where the model ends there, else the first.

    A model may name several: an end of turn and an end of text, or its padding.

    Raises:
        ValueError: if the model names none.
    """
    ids = eos_token_ids(directory)
    named = read_settings(directory / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    own = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return own if own in ids else ids[0]


def read_settings(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's directory; empty if there is no such file.

    Raises:
        ValueError: if it is no JSON.
    """
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RuleError(f"cannot read {path}: {error}", "download it again") from error
    return content if isinstance(content, dict) else {}
