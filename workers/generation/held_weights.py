"""What a server holds, by fingerprints of some tensors: an update that it acknowledged and did not load is found.

    files of a version ──fingerprints──► {tensor: first 8 bytes of its SHA-256}   as SGLang's /weights_checker on a CPU
    server, before and after the update ──► {tensor: whatever it computes}, for each of its ranks

    it said of the version before what the files say?
        yes: it must say so of the new one, too
        no (another dtype, a GPU's own hash, a part of a tensor, rounded): it is believed; told of if nothing changed

The tensors are whole and under their own names in every engine: none that SGLang fuses (q, k, v; gate, up), and none
that is large. That every other tensor was loaded is not shown by this; see docs/rollout.md for what shows it.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

Fingerprints = Mapping[str, str]
"""By the name of a tensor, as 16 hexadecimal digits."""

_PROBED: Final = re.compile(r"model\.layers\.(?P<layer>\d+)\.self_attn\.o_proj\.weight", re.ASCII)
_FINAL_NORM: Final = "model.norm.weight"
_FUSED: Final = ("qkv_proj", "gate_up_proj", "experts")  # SGLang's own names, which are in no file
_HASH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes of a tensor are."""

    path: Path
    begin: int
    end: int
    dtype: str
    """As safetensors names it."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Fingerprints of some tensors of a directory of weights, and how to ask a server for the same."""

    fingerprints: Fingerprints
    dtypes: Mapping[str, str]
    """Of the same tensors, in the files."""
    skipped: tuple[str, ...]
    """Parts of the names of all other tensors, as `skip_tensor_list` of /weights_checker."""

    def comparable_with(self, other: "Probe") -> Fingerprints:
        """Those of the tensors that have one dtype in both: the same values in another are other bytes."""
        return {name: value for name, value in self.fingerprints.items() if self.dtypes[name] == other.dtypes.get(name)}

    @classmethod
    def of(cls, directory: Path) -> "Probe":
        """Read them; without any where the model's tensors have other names than these architectures'.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is no safetensors.
        """
        places = dict(_places(directory))
        layers = sorted((int(match["layer"]), name) for name in places if (match := _PROBED.fullmatch(name)))
        probed = {name for _, name in (*layers[:1], *layers[-1:])} | ({_FINAL_NORM} & places.keys())
        return cls(
            {name: _fingerprint(places[name]) for name in sorted(probed)},
            {name: places[name].dtype for name in sorted(probed)},
            (*_FUSED, *sorted(places.keys() - probed)),
        )


class Held(StrEnum):
    """What fingerprints say of a server after an update."""

    NEW = "new"
    """In every tensor that can be compared with the files."""
    STALE = "stale"
    """It holds other values than the files in at least one of those."""
    UNMOVED = "unmoved"
    """None can be compared with the files, and none has changed, though the files have: rounding may do that, too."""
    UNKNOWN = "unknown"
    """None can be compared with the files."""


def compare(
    *,
    files_before: Fingerprints,
    files: Fingerprints,
    held_before: Sequence[Fingerprints],
    held: Sequence[Fingerprints],
) -> tuple[Held, list[str]]:
    """What a server holds after an update, and the tensors that show it where it is stale.

    Args:
        files_before: of the version that it held until now.
        files: of the version that it says it holds.
        held_before: what each of its ranks said of itself before the update.
        held: the same after it.

    Example:
        compare(files_before={"a": "1"}, files={"a": "2"}, held_before=[{"a": "1"}], held=[{"a": "1"}])
        # (Held.STALE, ["a"])
    """
    stale: set[str] = set()
    is_comparable, moved = False, []
    for before, after in zip(held_before, held, strict=False):
        for name in files.keys() & files_before.keys() & before.keys() & after.keys():
            if before[name] == files_before[name]:
                is_comparable = True
                stale |= {name} if after[name] != files[name] else set()
            elif files[name] != files_before[name]:
                moved.append(after[name] != before[name])
    if stale:
        return Held.STALE, sorted(stale)
    if is_comparable:
        return Held.NEW, []
    return (Held.UNMOVED if moved and not any(moved) else Held.UNKNOWN), []


def _places(directory: Path) -> Iterator[tuple[str, _Place]]:
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield name, _Place(path, 8 + header_size + begin, 8 + header_size + end, entry["dtype"])


def _fingerprint(place: _Place) -> str:
    with open(place.path, "rb") as file:
        file.seek(place.begin)
        return fingerprint(file.read(place.end - place.begin))


def fingerprint(data: bytes | memoryview) -> str:
    """Of the bytes of a tensor."""
    return hashlib.sha256(data).digest()[:_HASH_BYTES].hex()
