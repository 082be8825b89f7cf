"""The version record: which weights are the present ones, from the master to the manager.

master ──leased record in name-resolve──► manager ──POST /bring_to──► generation workers, which read the manifest
                digest: from the master's own hand to the reader's, beside the file system that carries the files
"""

from pathlib import Path

import msgspec

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
