"""The version record: which weights are the present ones, from the master to the manager.

master ──leased record in name-resolve──► manager ──POST /bring_to──► generation workers, which read the manifest
                digest: from the master's own hand to the reader's, beside the file system that carries the files

The findings of generation servers about published weights come back to the trainer that has written them.

    manager --reading(directory)-----> leased record in name-resolve --read_weights_in_use--> master: which stay
            --refuse(refusal)-------->                               --read_refusal---------> master: what is damaged

Where the record is missing, nobody knows what is being read, and nothing is removed until it is back.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from corral.name_resolve.base import Lease, NameNotFoundError, NameService, NameServiceError
from corral.scheduling.policy_version import PolicyVersion


class PublishedWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Example: PublishedWeights(version="1.7", weights="/runs/x/weights/v00000007-e1", digest="9f86d08...")."""

    version: str
    """A policy version, as its tag."""
    weights: str
    """Their directory."""
    digest: str | None
    """Digest of their manifest; None for initial weights, which this trial has not written."""

    @property
    def policy_version(self) -> PolicyVersion:
        return PolicyVersion.parse(self.version)

    @property
    def directory(self) -> Path:
        return Path(self.weights)

    def to_json(self) -> str:
        """The text of the record."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "PublishedWeights":
        """Read the record; msgspec.ValidationError if it is none."""
        return msgspec.json.decode(text, type=cls)


NOTHING_IN_USE: Final = "{}"


class Refusal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server has found weights to be others than were published, more than once."""

    weights: str
    """Their directory."""
    server: str
    reason: str
    is_served: bool
    """Whether another server holds the same version: it can be had."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reading: list[str] = []
    refused: Refusal | None = None
    """The last one."""


class WeightsInUse:
    """The manager's side.

    Example:
        async with in_use.reading(published.directory):     # the record names it before anybody opens a file of it
            await client.bring_to(url, published)
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._readers: Counter[Path] = Counter()
        self._refused: Refusal | None = None
        self._published = _Record()
        self._publishing = asyncio.Lock()

    @asynccontextmanager
    async def reading(self, weights: Path) -> AsyncIterator[None]:
        """While the block runs, `weights` is being read."""
        self._readers[weights] += 1
        try:
            await self._publish()
            yield
        finally:
            self._readers[weights] -= 1
            await self._publish()

    async def refuse(self, refusal: Refusal) -> None:
        """Let the trainer know, until another refusal takes its place."""
        self._refused = refusal
        await self._publish()

    async def _publish(self) -> None:
        async with self._publishing:  # an older text must not land after a newer one
            record = _Record(reading=sorted(str(path) for path in +self._readers), refused=self._refused)
            if record != self._published:  # one of hundreds that read the same says it for all
                await asyncio.to_thread(self._lease.update, msgspec.json.encode(record).decode())
                self._published = record


def read_weights_in_use(names: NameService, key: str) -> frozenset[Path] | None:
    """The directories that are being read, as the manager says; None if nobody knows at the moment."""
    record = _read(names, key)
    return None if record is None else frozenset(Path(path) for path in record.reading)


def read_refusal(names: NameService, key: str) -> Refusal | None:
    """The version last reported as damaged to the manager, which may be long gone; None if there was none."""
    record = _read(names, key)
    return None if record is None else record.refused


def _read(names: NameService, key: str) -> _Record | None:
    try:
        return msgspec.json.decode(names.get(key), type=_Record)
    except (NameNotFoundError, NameServiceError):
        return None
