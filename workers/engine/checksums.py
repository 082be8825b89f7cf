"""Checksums of an engine's parameters, as SGLang's /weights_checker has them: which weights it computes with.

new weights, the old ones generate on ──of(names)──► hashed, and kept beside the tensor's count of writes
between two steps, live by now ─────────of(names)──► the same without hashing, but for what was written into since
"""

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor, nn

_HASH_THREADS: Final = 2  # two large tensors are what is asked for with every update
_HASH_BYTES: Final = 8


class Checksums:
    """SHA-256 of the bytes of each parameter of one model, its first 8 bytes. Any thread may ask."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._known: dict[str, tuple[int, str]] = {}
        """By name: the tensor's count of writes when it was hashed, and what came out."""

    def names(self, *, skipped: Sequence[str]) -> list[str]:
        """Of the parameters whose names contain none of `skipped`."""
        return [name for name in self._parameters if not any(part in name for part in skipped)]

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """By name, as 16 hexadecimal digits."""
        wanted = list(names)
        if unknown := [name for name in wanted if not self._is_known(name)]:
            with ThreadPoolExecutor(_HASH_THREADS) as pool:
                self._known.update(zip(unknown, pool.map(self._hashed, unknown), strict=True))
        return {name: self._known[name][1] for name in wanted}

    def _is_known(self, name: str) -> bool:
        return name in self._known and self._known[name][0] == self._parameters[name]._version

    def _hashed(self, name: str) -> tuple[int, str]:
        tensor = self._parameters[name]
        num_writes = tensor._version  # of before: a write meanwhile is seen the next time
        return num_writes, _checksum(tensor)


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).digest()[:_HASH_BYTES].hex()
