"""Text and token ids of a model directory, without torch: the one place that says how prompts and answers are encoded.

prompt ──► [<bos>] prompt tokens        as the model's tokenizer begins a text
answer ──► answer tokens, end of answer nothing in between: the answer continues the prompt
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.experiments.regular_file import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(directory: Path) -> "Tokenizer":
    """The `tokenizers.Tokenizer` of a model directory, without the truncation and padding that were saved with it:
    these are settings of whoever encoded a batch last, and transformers leaves them aside, too.

    Raises:
        ValueError: if its tokenizer.json cannot be used.
    """
    from tokenizers import Tokenizer  # only who encodes something pays for it

    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(f"cannot use the tokenizer {path}: {error}; download it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """With the special tokens that the tokenizer gives to a text of its own, such as <bos>.

    Raises:
        ValueError: if the text has the first of them already, as what a chat template has written does.
    """
    encoding = tokenizer.encode(prompt)
    ids, is_added = encoding.ids, encoding.special_tokens_mask
    if len(ids) > 1 and ids[0] == ids[1] and is_added[0]:
        raise ValueError(
            f"the prompt begins with {tokenizer.id_to_token(ids[0])}, which the tokenizer puts before every text, so "
            "that it would be there twice; remove it from the text, or write the prompt as messages"
        )
    return list(ids)


def encode_answer(tokenizer: Any, answer: str) -> list[int]:
    """Without special tokens: a <bos> between prompt and answer would be learned as part of every answer."""
    return list(tokenizer.encode(answer, add_special_tokens=False).ids)


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
        raise ValueError(f"model {directory} names no eos_token_id in generation_config.json or config.json; add one")
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
        raise ValueError(f"cannot read {path}: {error}; download it again") from error
    return content if isinstance(content, dict) else {}
