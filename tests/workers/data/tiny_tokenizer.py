"""A tokenizer of one token a character, written without torch: with <bos> before every text, where it is wanted."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

PAD, EOS, BOS = 0, 1, 2
CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"


def write_tokenizer(
    directory: Path, *, has_bos: bool = False, eos_token_id: Any = EOS, eos_token: Any = "<eos>"
) -> Path:
    """tokenizer.json, tokenizer_config.json and a config.json that names the ends of an answer."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<bos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    if has_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    return directory


def ids_of(text: str) -> list[int]:
    """What the tokenizer makes of a text, without special tokens."""
    return [3 + CHARACTERS.index(character) for character in text]


class Characters:
    """A tokenizer of code points."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def id_to_token(self, token: int) -> str:
        return chr(token)
