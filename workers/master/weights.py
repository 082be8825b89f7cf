"""Versions of the published role's weights: written, published, published again where they were damaged, removed.

    publish      ranks write and hash ──► manifest ──► weights/vSTEP-eEPOCH ──► the record that the manager reads
    again        servers refuse the present version ──manager's record──► written anew, beside ──► published
                                                                                └── too often ──► CannotContinueError
    remove_old   weights/v00000089-e1  v00000090-e1      the lineage: its newest versions stay
                         v00000091-e1  v00000092-e1      orphans, since epoch 2 continues step 90: they go
                         v00000091-e2  v00000091-e2-copy1    the present version, which was damaged, and its copy

A file that was flipped on a disk stays so, and a commit gives it a second name. The trainer's memory is the one place
that is known to hold the version still, until the next step changes it.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from corral.experiments.trial.directory import link_files
from corral.scheduling.policy_version import Lineage, PolicyVersion
from corral.workers.checkpoint.checkpoint import WEIGHTS
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.manifest import (
    MANIFEST_NAME,
    SealedDirectory,
    link_weights,
    read_manifest,
    write_manifest,
)
from corral.workers.checkpoint.published_weights import PublishedWeights, read_refusal, read_weights_in_use
from corral.workers.checkpoint.removal import Remover
from corral.workers.lifecycle.worker import CannotContinueError
from corral.workers.master.epoch import Epoch
from corral.workers.master.trainer_group import TrainerGroup
from corral.workers.requests.messages import TrainNotice

_KEPT: Final = 3  # a server that has just heard of a version may not have reported yet that it reads it
_MOST_COPIES: Final = 3  # of one version; what damages each of them, a disk or a server's host, is for people to mend
_NAME: Final = re.compile(r"v(?P<step>\d{8,})-e(?P<epoch>\d+)(-copy\d+)?", re.ASCII)


class PublishedVersions:
    """Of one epoch."""

    def __init__(self, epoch: Epoch, trainers: TrainerGroup, *, publish: Callable[[PublishedWeights], None]) -> None:
        """
        Args:
            publish: makes weights known to the generation-server manager.
        """
        self._epoch = epoch
        self._trainers = trainers
        self._publish = publish
        self._remover = Remover()
        self.written: SealedDirectory | None = None
        """The newest version that this epoch has written."""
        self._damaged: PolicyVersion | None = None
        """The last one that was."""
        self._num_copies = 0
        self._has_alarm = False

    @property
    def directory(self) -> Path:
        """Of the present version."""
        epoch = self._epoch
        return self.written.path if self.written is not None else epoch.initial_weights[epoch.spec.published_role]

    async def publish_first(self, version: PolicyVersion) -> None:
        """What the epoch starts from; written before, where no directory has it and nothing is committed yet."""
        if self._epoch.spec.writes_first_version and self._epoch.checkpoint is None:
            await self._write(version)
        else:
            await self._announce(version)

    async def publish(self, version: PolicyVersion) -> None:
        """Hand the weights that the present step has just made to the generation servers.

        Servers need not wait for the rest of the step, nor for the commit: if either never comes, these weights are
        orphans, and so is what is made with them. The lineage knows neither, and turns their samples away.
        """
        await self._write(version)
        if self._has_alarm:  # the version before needs nobody's attention any more
            await self._tell(is_alarm=False, text=f"version {version} is published", details="", causes=[])

    async def publish_again_if_damaged(self, version: PolicyVersion) -> bool:
        """Write and publish the weights that the ranks hold once more, if servers refuse those that were published.

        Returns:
            Whether it did: a commit that names those from before is damaged, too.

        Raises:
            CannotContinueError: they were damaged each time, and no server holds them.
        """
        context = self._epoch.context
        refusal = await asyncio.to_thread(read_refusal, context.names, context.keys.weights_in_use())
        if refusal is None or refusal.weights != str(self.directory):
            return False
        cause = f"{refusal.server}: {refusal.reason}"
        if version != self._damaged:
            self._damaged, self._num_copies = version, 0
        if self._num_copies == _MOST_COPIES:
            if refusal.is_served:
                return False
            raise CannotContinueError(
                f"version {version} was written {_MOST_COPIES + 1} times, and no server could take it over, the last "
                f"time because {cause}; look at the file system that has {self.directory}, and at that server's host"
            )
        self._num_copies += 1
        await self._tell(
            is_alarm=True,
            text=f"version {version} was damaged after it was written, and is published again, "
            f"{self._num_copies} of {_MOST_COPIES} times",
            details=f"in {self.directory}",
            causes=[cause],
        )
        await self._write(version, copy=self._num_copies)
        return True

    async def export(self, name: str, version: PolicyVersion) -> None:
        """Keep a permanent copy of the present weights as exports/{name}."""
        directory = await self._epoch.disk.run(self.keep, name, version)
        await self._epoch.note("weights_exported", version=str(version), directory=str(directory))

    def in_use(self) -> frozenset[Path] | None:
        """Directories of weights that generation servers are reading; None if nobody knows at the moment."""
        if self._epoch.spec.source != "trajectories":
            return frozenset()  # no servers generate
        return read_weights_in_use(self._epoch.context.names, self._epoch.context.keys.weights_in_use())

    async def remove_old(self, present: PolicyVersion) -> None:
        """What neither the lineage needs nor a server reads."""
        in_use = await asyncio.to_thread(self.in_use)
        if in_use is not None:
            await self._epoch.disk.run(
                remove_old_weights,
                self._epoch.trial.weights_path,
                self._epoch.lineage,
                present=present,
                in_use=in_use,
                remover=self._remover,
            )

    async def _write(self, version: PolicyVersion, *, copy: int = 0) -> None:
        """Write the role's weights, and publish them once they have their manifest.

        Args:
            copy: which one it is of this version, whose files from before are not to be trusted.
        """
        epoch = self._epoch
        # Version 0 is of no epoch, and may be written by several: each has a folder that only it writes into.
        directory = epoch.trial.weights_path / weights_name(version._replace(epoch=epoch.writer.epoch), copy=copy)
        await epoch.disk.run(directory.mkdir, mode=0o700)
        with epoch.during("write weights", self._trainers.workers):
            base = None if copy else self._base()
            files = await self._trainers.save_weights(epoch.spec.published_role, directory, base=base)
            self.written = await epoch.disk.run(self._seal, directory, files, version)
        await self._announce(version)

    def _seal(self, directory: Path, files: Mapping[str, FileEntry], version: PolicyVersion) -> SealedDirectory:
        self._epoch.writer.check()  # a master that was replaced publishes nothing: its successor has the say
        return write_manifest(directory, files, {"version": str(version)})

    def _base(self) -> Path | None:
        """What deltas lead from, where they are wanted: the version that the present weights were trained from.

        Guarantee: it is of the lineage, since it is what this epoch wrote last, or what it began with. A model's own
        directory has no manifest, and what is trained from it no deltas.
        """
        is_sealed = self.written is not None or self._epoch.checkpoint is not None
        return self.directory if self._epoch.spec.writes_deltas and is_sealed else None

    async def _announce(self, version: PolicyVersion) -> None:
        """Say what the present weights are.

        Guarantee: their digest is known from those who wrote them, or from the commit, which names the manifest of the
        whole checkpoint; it is not that of whatever is in the directory now.
        """
        digest = self.written.digest if self.written is not None else await self._epoch.disk.run(self._committed_digest)
        self._publish(PublishedWeights(version=str(version), weights=str(self.directory), digest=digest))

    def _committed_digest(self) -> str | None:
        checkpoint, commit = self._epoch.checkpoint, self._epoch.recovery.commit
        if checkpoint is None or commit is None:
            return None
        return read_manifest(checkpoint, commit.manifest_digest).files[f"{WEIGHTS}/{MANIFEST_NAME}"].digest

    def keep(self, name: str, version: PolicyVersion) -> Path:
        """Give the files of the present weights second names in exports/{name}; what was there before goes."""
        target = self._epoch.trial.exports_path / name
        if not self._remover.remove(target):
            target = target.with_name(f"{name}-{version}")
        if self.written is not None:
            link_weights(self.written, target)
        else:
            link_files(self.directory, target)
        return target

    async def _tell(self, *, is_alarm: bool, text: str, details: str, causes: list[str]) -> None:
        self._has_alarm = is_alarm
        step = self._damaged.step if self._damaged is not None else 0
        notice = TrainNotice(topic="published weights", is_alarm=is_alarm, text=text, details=details, causes=causes)
        await self._epoch.tell(notice, step=step)


def weights_name(version: PolicyVersion, *, copy: int = 0) -> str:
    """Name of the directory of a version, or of a further copy of it."""
    return f"v{version.step:08d}-e{version.epoch}" + (f"-copy{copy}" if copy else "")


def remove_old_weights(
    directory: Path, lineage: Lineage, *, present: PolicyVersion, in_use: Collection[Path], remover: Remover
) -> list[str]:
    """Removes orphans, and the lineage's versions before its newest ones.

    Args:
        directory: holds one folder per version.
        present: the version that the trainer holds; folders of a later epoch than its own are not its business.
        in_use: folders that a server reads.

    Returns:
        The names that were removed.
    """
    matches = [match for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    versions = {match[0]: PolicyVersion(int(match["epoch"]), int(match["step"])) for match in matches}
    living = sorted(
        {version for version in versions.values() if lineage.contains(version)}, key=lambda version: version.step
    )
    kept = {*living[-_KEPT:], present}

    def is_old(path: Path) -> bool:
        version = versions.get(path.name, present)
        return version not in kept and version.epoch <= present.epoch and path not in in_use

    return remover.remove_old(directory, is_old=is_old)
