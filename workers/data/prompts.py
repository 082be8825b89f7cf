"""Prompts: the rows of a data set, as the plan has them, in the order that seed and pass give them.

row --uid "{dataset_epoch}:{row_id}"--> rollout workers (prompts) or model workers (rows whose answers are learned)

Several sources: each goes through its own rows pass by pass, in its own order; its weight sets how often it is asked.

    gsm8k, weight 3    0:gsm8k/7   0:gsm8k/2   0:gsm8k/5              0:gsm8k/1  ...
    code,  weight 1                                       0:code/3               ...   1:code/3 when all were taken once

Where a source has an order, each of its passes goes through its rows by their values; the seed decides among equals.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, islice
from math import lcm
from types import MappingProxyType

from corral.experiments.config.data import DatasetConfig
from corral.experiments.datasets.dataset import Dataset
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.worker_specs import DatasetSpec

GROUP_REWARD = "reward/group"
"""Statistic of a group: the mean of its rewards, also where it is dropped since all of them are equal."""

BAD_ROW = "bad_row"
"""Why a row is dropped that is broken or too long."""


def open_problems(config: DatasetConfig, encoder: PromptEncoder) -> Dataset:
    """Held-out problems as a configuration names them.

    Raises:
        ConfigError: if they cannot be read.
        ValueError: if a prompt is longer than the limit of its dataset.
    """
    rows = Dataset.open(config, kind="prompts")
    for row in rows.values():
        if (num_tokens := len(encoder.encode(row.prompt, tools=row.tools))) > config.max_prompt_tokens:
            raise ValueError(
                f"the prompt of {row.place} has {num_tokens} tokens, more than max_prompt_tokens "
                f"{config.max_prompt_tokens}; shorten it"
            )
    return rows


def ordered_uids(
    row_ids: Sequence[str], *, seed: int, dataset_epoch: int, shuffle: bool, values: Sequence[float] = ()
) -> list[str]:
    """All uids of one pass, in the order in which they are issued; the same in every process.

    Args:
        values: of each row: the pass goes from the lowest to the highest. None where the seed alone decides.
    """
    order = sorted(range(len(row_ids)), key=row_ids.__getitem__)
    if shuffle:
        random.Random(f"{seed}/{dataset_epoch}").shuffle(order)
    if values:
        order.sort(key=values.__getitem__)  # rows that are equal stay as they are
    return [f"{dataset_epoch}:{row_ids[at]}" for at in order]


@dataclass(frozen=True, slots=True)
class PlannedPrompts:
    """The rows of a data set as the plan has them, by their names, and the order in which they are issued."""

    config: DatasetConfig
    row_ids: list[str]
    """In the order of sources and files."""
    values: Mapping[str, Sequence[float]]
    """[rows] by source, as `RowIndex` has them."""

    @classmethod
    def load(cls, spec: DatasetSpec) -> "PlannedPrompts":
        """Raises what `Dataset.planned` does."""
        rows = Dataset.planned(spec)
        return cls(spec.config, list(rows), {one.name: one.index.values for one in rows.sources})

    def uids(self, *, seed: int, num_epochs: int) -> Iterator[str]:
        """Every uid of a trial, in the order in which they are issued."""
        weights = {name: one.weight for name, one in self.config.sources.items()}
        shuffle, values = self.config.shuffle, self.values
        return uids_of_passes(
            self.row_ids, seed=seed, num_epochs=num_epochs, shuffle=shuffle, weights=weights, values=values
        )


def uids_of_passes(
    row_ids: Sequence[str],
    *,
    seed: int,
    num_epochs: int,
    shuffle: bool,
    weights: Mapping[str, float | None] = MappingProxyType({}),
    values: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Iterator[str]:
    """As many uids as all passes over the rows have, in the order in which they are issued.

    Args:
        row_ids: those of a source in the order of its values.
        weights: of each source, whose name is what its rows begin with; None is the number of its rows. With these
            alone, each pass has each row once. Empty where there is one source, which has no name.
        values: of each source, as `ordered_uids` takes them.
    """
    ids_by_source: dict[str, list[str]] = {name: [] for name in weights or ("",)}
    for row_id in row_ids:
        ids_by_source[row_id.partition("/")[0] if weights else ""].append(row_id)
    endless = [_endless(ids, values.get(name, ()), seed=seed, shuffle=shuffle) for name, ids in ids_by_source.items()]
    turns = turns_of_sources(weights, {name: len(ids) for name, ids in ids_by_source.items()})
    yield from (next(endless[turn]) for turn in islice(turns, num_epochs * len(row_ids)))


def turns_of_sources(weights: Mapping[str, float | None], sizes: Mapping[str, int]) -> Iterator[int]:
    """Which source each prompt is of, for ever, by its place among them; always 0 where there is one without a name.

    Args:
        weights: as those of `uids_of_passes`.
        sizes: rows of each.
    """
    ratios = [Fraction(weight or sizes[name]) for name, weight in weights.items()] or [Fraction(1)]
    return turns_of([int(ratio * lcm(*(one.denominator for one in ratios))) for ratio in ratios])


def turns_of(ratios: Sequence[int]) -> Iterator[int]:
    """The source of each turn, for ever: the source that is furthest behind its proportion of the turns so far.

    No source is ever a whole turn ahead of its proportion. After `sum(ratios)` turns each source has had its ratio.
    """
    whole, taken = sum(ratios), [0] * len(ratios)
    for turn in count(1):
        chosen = max(range(len(ratios)), key=lambda at: ratios[at] * turn - taken[at] * whole)
        taken[chosen] += 1
        yield chosen


def _endless(row_ids: Sequence[str], values: Sequence[float], *, seed: int, shuffle: bool) -> Iterator[str]:
    for dataset_epoch in count():
        yield from ordered_uids(row_ids, seed=seed, dataset_epoch=dataset_epoch, shuffle=shuffle, values=values)


def held_out_uids(row_ids: Iterable[str], *, version: int) -> list[str]:
    """Uids of held-out rows that weights of this version are looked at with.

    Their passes are below 0, where those of what is learned from are not. Each version has its own, so that samples
    which are on their way out are never taken for those of the next evaluation.
    """
    return [f"{-1 - version}:{row_id}" for row_id in row_ids]


def is_held_out(uid: str) -> bool:
    """Whether nothing is learned from this row."""
    return split_uid(uid)[0] < 0


def split_uid(uid: str) -> tuple[int, str]:
    """(dataset_epoch, row_id) of a uid."""
    dataset_epoch, _, row_id = uid.partition(":")
    return int(dataset_epoch), row_id


def source_of(uid: str) -> str:
    """Of a row of `dataset.sources`: which of them."""
    return split_uid(uid)[1].partition("/")[0]
