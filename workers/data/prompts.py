"""Prompts: the rows of a jsonl file, checked against the plan, in the order that seed and pass give them.

row (a JSON object) --uid "{dataset_epoch}:{row_id}"--> rollout workers (prompts) or model workers (SFT rows)
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from corral.experiments.config.data import DatasetConfig, RowKind
from corral.experiments.inputs.dataset_file import DatasetReader, DatasetRow
from corral.experiments.regular_file import open_regular
from corral.experiments.worker_specs import DatasetSpec
from corral.scheduling.worker_information import unfold_numbers

RowsById = dict[str, DatasetRow]


def load_planned_rows(spec: DatasetSpec) -> RowsById:
    """The rows of a dataset that was checked at submission, in file order, but for those that were too long then.

    Raises:
        ValueError: if the file has changed since.
    """
    rows, reader = _read(spec.config, spec.row_kind, too_long=spec.too_long)
    _require_planned(spec, reader.sha256)
    return rows


def load_row_ids(spec: DatasetSpec) -> list[str]:
    """The names of the same rows, in file order; nothing else of them is decoded.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it has changed since.
    """
    row: Any = msgspec.defstruct("Row", [("row_id", Any, None)], rename={"row_id": spec.config.id_key})
    decoder, left_out = msgspec.json.Decoder(row), frozenset(unfold_numbers(spec.too_long))
    row_ids: list[str] = []
    with open_regular(spec.config.file) as stream:
        _require_planned(spec, hashlib.file_digest(stream, "sha256").hexdigest())
        stream.seek(0)
        for number, line in enumerate(stream):
            if line.strip() and number + 1 not in left_out:
                given = decoder.decode(line).row_id
                row_ids.append(str(number if given is None else given))
    return row_ids


def load_held_out_rows(config: DatasetConfig) -> RowsById:
    """The rows of held-out problems, of which the plan keeps no digest."""
    return _read(config, "prompts")[0]


def _read(config: DatasetConfig, kind: RowKind, *, too_long: str = "") -> tuple[RowsById, DatasetReader]:
    reader = DatasetReader(config=config, kind=kind, left_out=frozenset(unfold_numbers(too_long)))
    rows = {row.row_id: row for row in reader}
    reader.raise_problems()
    return rows, reader


def _require_planned(spec: DatasetSpec, sha256: str) -> None:
    if sha256 != spec.sha256:
        raise ValueError(
            f"dataset {spec.config.path} has changed since the trial was submitted (sha256 {sha256}, "
            f"plan {spec.sha256}); put the old file back, or submit a new trial"
        )


def ordered_uids(row_ids: list[str], *, seed: int, dataset_epoch: int, shuffle: bool) -> list[str]:
    """All uids of one pass, in the order in which they are issued; the same in every process."""
    order = sorted(row_ids)
    if shuffle:
        random.Random(f"{seed}/{dataset_epoch}").shuffle(order)
    return [f"{dataset_epoch}:{row_id}" for row_id in order]


def uids_of_passes(row_ids: list[str], *, seed: int, num_epochs: int, shuffle: bool) -> Iterator[str]:
    """Every uid of all passes, in the order in which they are issued."""
    for dataset_epoch in range(num_epochs):
        yield from ordered_uids(row_ids, seed=seed, dataset_epoch=dataset_epoch, shuffle=shuffle)


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
