"""The small files of a model beside its weights: configuration, tokenizer, chat template.

    config of the model in memory ──► config.json, generation_config.json ──┐
    directory that it was loaded from ──► tokenizer and others ─────────────┴──► {name: content}, kept in memory

They are read once, when the model is loaded: that directory may be a commit, which is removed as newer ones come.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from corral.workers.backends.heads import Head

_PATTERNS: Final = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)


def companion_files(directory: Path, config: Any, head: Head[Any], *, dtype: torch.dtype) -> dict[str, bytes]:
    """What is saved beside weights in `dtype`, so that they load as what `head` says; as transformers writes it.

    Args:
        config: of the model that was loaded from `directory`.
    """
    with torch.device("meta"):  # the class is wanted, not a model
        model = head.saved_class.from_config(copy.deepcopy(config), dtype=dtype)
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        written = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    found = [path for pattern in _PATTERNS for path in directory.glob(pattern) if path.is_file()]
    return written | {path.name: path.read_bytes() for path in found}
