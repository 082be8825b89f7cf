"""Prompts: the rows of a jsonl file, checked against the plan, in the order that seed and pass give them.

row (a JSON object) --uid "{dataset_epoch}:{row_id}"--> rollout workers (prompts) or model workers (SFT rows)
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.experiments.config import DatasetConfig
from corral.experiments.plan import DatasetSpec


@dataclass(frozen=True)
class PromptDataset:
    """Rows by id, in file order."""

    rows: Mapping[str, Mapping[str, Any]]
    config: DatasetConfig

    @classmethod
    def load(cls, spec: DatasetSpec) -> "PromptDataset":
        """Read the file that the plan names.

        Raises:
            ValueError: if the file is not the one that was checked at submission.
        """
        text = spec.config.path.read_bytes()
        digest = hashlib.sha256(text).hexdigest()
        if digest != spec.sha256:
            raise ValueError(
                f"dataset {spec.config.path} has changed since the trial was submitted (sha256 {digest}, plan {spec.sha256}); "
                "put the old file back, or submit a new trial"
            )
        return cls(rows=_rows(text, spec.config), config=spec.config)

    @classmethod
    def load_unchecked(cls, config: DatasetConfig) -> "PromptDataset":
        """Read a file that the plan has no digest of, such as held-out problems."""
        return cls(rows=_rows(config.path.read_bytes(), config), config=config)

    def prompt(self, row_id: str) -> str:
        """The prompt's text."""
        return str(self.rows[row_id][self.config.prompt_key])

    def answer(self, row_id: str) -> str:
        """The reference answer's text."""
        return str(self.rows[row_id][self.config.answer_key])


def _rows(text: bytes, config: DatasetConfig) -> dict[str, Mapping[str, Any]]:
    rows: dict[str, Mapping[str, Any]] = {}
    for number, line in enumerate(text.decode().splitlines()):
        if line.strip():
            row = json.loads(line)
            rows[str(row.get(config.id_key, number))] = row
    return rows


def ordered_uids(row_ids: list[str], *, seed: int, dataset_epoch: int, shuffle: bool) -> list[str]:
    """All uids of one pass, in the order in which they are issued; the same in every process."""
    order = sorted(row_ids)
    if shuffle:
        random.Random(f"{seed}/{dataset_epoch}").shuffle(order)
    return [f"{dataset_epoch}:{row_id}" for row_id in order]


def uids_of_share(
    row_ids: list[str], *, seed: int, num_epochs: int, shuffle: bool, share: int, num_shares: int
) -> Iterator[str]:
    """Every uid that one of `num_shares` workers issues, over all passes."""
    for dataset_epoch in range(num_epochs):
        yield from ordered_uids(row_ids, seed=seed, dataset_epoch=dataset_epoch, shuffle=shuffle)[share::num_shares]


def split_uid(uid: str) -> tuple[int, str]:
    """(dataset_epoch, row_id) of a uid."""
    dataset_epoch, _, row_id = uid.partition(":")
    return int(dataset_epoch), row_id


def load_tokenizer(directory: Path) -> Any:
    """The `tokenizers.Tokenizer` of a model directory: text <-> token ids without importing torch or transformers."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def eos_token_id(directory: Path) -> int:
    """The id of the token that ends an answer, from generation_config.json or config.json.

    Raises:
        ValueError: if the model names none.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.exists():
            value = json.loads(path.read_text()).get("eos_token_id")
            if isinstance(value, list) and value:
                value = value[0]
            if isinstance(value, int):
                return value
    raise ValueError(f"model {directory} names no eos_token_id in generation_config.json or config.json; add one")
