"""samples/ -> answers for the page: of steps between the first that is kept and the newest, those of extreme rewards.

Whatever a model wrote, the page stays small: steps, answers of a step, characters and tokens have bounds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corral.experiments.errors import ConfigError
from corral.experiments.prompts.tokens import load_tokenizer
from corral.experiments.trial.samples import PART
from corral.launcher.samples.find import KeptAnswers, gaps_of, name_of

OF_A_STEP = 8
_MOST_CHARACTERS = 20_000
_MOST_TOKENS = 2_000
_MOST_BYTES = 8_000_000  # of all; with more, the page would open slowly
_TOKEN_BYTES = 25  # of one in JSON: its text and its numbers
_SHOWN = ("step", "uid", "reward", "advantage", "length", "is_cut", "staleness", "gap")


def answers_of(folder: Path, tokenizer: Path, *, most: int) -> dict[str, Any]:
    """So many answers at most, as `{"rows", "of_steps"}`; none where none are kept.

    Args:
        tokenizer: directory of the model whose tokens they are; where it is gone, answers have texts alone.
    """
    try:
        kept = KeptAnswers(folder)
    except ConfigError:
        return {"rows": [], "of_steps": 0}
    words = _Words(tokenizer)
    steps = kept.steps("all")
    chosen = steps[:: -max(1, -(-len(steps) * OF_A_STEP // most))]  # the newest is one of them
    rows = [_for_page(row, words) for step in chosen for row in _extremes(kept, step)]
    while len(rows) > 1 and sum(map(_size, rows)) > _MOST_BYTES:
        rows = rows[::2]
    return {"rows": rows, "of_steps": len(steps)}


def _extremes(kept: KeptAnswers, step: int) -> Sequence[Mapping[str, Any]]:
    rows = {name_of(row): row for sort in ("-reward", "reward") for row in kept.read([step], sort=sort, most=4)}
    return list(rows.values())


def _for_page(row: Mapping[str, Any], words: "_Words") -> dict[str, Any]:
    end = _MOST_TOKENS
    tokens = {
        "texts": words.of(row["ids"][:end]),
        "made": list(map(int, row["made"][:end])),
        "logprob": _rounded(row["logprobs"][:end]),
        "gap": _rounded((gaps_of(row) or [])[:end]),
        "advantage": _rounded(row["advantages"][:end]),
    }
    texts = {name: (row.get(name) or "")[:_MOST_CHARACTERS] for name in ("prompt", "said", "remarks")}
    num_left_out = max(0, len(row["ids"]) - end)
    return {
        "name": name_of(row),
        **{name: row[name] for name in _SHOWN},
        "parts": {
            name.removeprefix(PART): value for name, value in row.items() if name.startswith(PART) and value is not None
        },
        **texts,
        "tokens": tokens if tokens["texts"] else None,
        "tokens_left_out": num_left_out,
    }


def _size(row: Mapping[str, Any]) -> int:
    num_tokens = len(row["tokens"]["texts"]) if row["tokens"] else 0
    return len(row["prompt"]) + len(row["said"]) + len(row["remarks"]) + _TOKEN_BYTES * num_tokens


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]


class _Words:
    """Token ids as texts, each decoded once."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer: Any = None
        if (directory / "tokenizer.json").is_file():
            self._tokenizer = load_tokenizer(directory)
        self._text_by_id: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """A text for each; none at all without a tokenizer."""
        if self._tokenizer is None:
            return []
        for new in {*ids} - self._text_by_id.keys():
            self._text_by_id[new] = self._tokenizer.decode([new], skip_special_tokens=False)
        return [self._text_by_id[one] for one in ids]
