"""What an epoch leaves on disk: versions of the weights, commits, lines of metrics, exports; and what may go again.

    write_weights   ranks write and hash ──► manifest ──► weights/vSTEP-eEPOCH, which may be published
    begin_commit    ranks copy ──► + second names of the published weights, the ledger ──► a moment
    finish_commit   ranks have written and hashed ──► published weights are read ──► manifest ──► entry of the trial log

The master writes nothing but manifests, ledgers and lines. What ranks have just written for a commit it does not read:
their replies say what it is. The published weights lie there since an earlier moment, and are read again, beside
training. Every other method that touches a file does so in the epoch's one thread for that (`Disk`).
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.trial.directory import link_files
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.checkpoint.checkpoint import (
    WEIGHTS,
    CheckpointWriter,
    collect_garbage,
    state_folder,
    weights_folder,
)
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.kept_weights import link_weights
from corral.workers.checkpoint.ledger import LedgerDelta, write_delta
from corral.workers.checkpoint.manifest import (
    MANIFEST_NAME,
    CorruptCheckpointError,
    SealedDirectory,
    read_manifest,
    verify_manifest,
    write_manifest,
)
from corral.workers.checkpoint.published_weights import PublishedWeights
from corral.workers.checkpoint.removal import Remover
from corral.workers.master.disk import Disk
from corral.workers.master.epoch_parts import EpochParts
from corral.workers.master.metrics import LineSizes, StepLines
from corral.workers.master.old_weights import remove_old_weights, weights_name
from corral.workers.master.step.all_or_first import all_or_first_error

_LINE_SIZES = "lines"  # in a checkpoint's manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitMoment:
    """What a commit stands for beside the files that ranks are writing: all of the moment in which it began."""

    checkpoint: CheckpointWriter
    version: PolicyVersion
    delta: LedgerDelta
    """What is consumed and was not committed before."""
    extra: Mapping[str, Any]
    """Of the manifest."""
    published: SealedDirectory | None
    """The version whose files have second names in the checkpoint."""

    @property
    def step(self) -> int:
        return self.checkpoint.step


class DurableState:
    """The files of one epoch."""

    def __init__(self, parts: EpochParts, disk: Disk) -> None:
        self._parts = parts
        self._disk = disk
        self._remover = Remover()
        self.committed_step = parts.recovery.commit.step if parts.recovery.commit else 0
        self._written: SealedDirectory | None = None
        """The newest version of the published weights that this epoch has written."""
        self._damage: tuple[Path, str] | None = None
        """The version that a commit found to be damaged, and how."""

    async def open_lines(self) -> None:
        """Cut the lines back to what the commit covers that this epoch continues."""
        self._lines = await self._disk.run(self._open_lines)

    # What the epoch starts from

    @property
    def weights(self) -> Path:
        """The present weights of the published role."""
        return self._written.path if self._written is not None else self.initial_weights[self._published_role]

    @property
    def initial_weights(self) -> dict[str, Path]:
        """Where each trained role's weights are at the start of the epoch."""
        checkpoint = self._checkpoint()
        if checkpoint is None:
            return dict(self._parts.spec.initial_weights)
        return {role: checkpoint / self._weights_folder(role) for role in self._roles}

    @property
    def initial_states(self) -> dict[str, Path]:
        """Where each trained role's training state is; none where nothing was committed yet."""
        checkpoint = self._checkpoint()
        return {role: checkpoint / state_folder(role) for role in self._roles} if checkpoint is not None else {}

    def _checkpoint(self) -> Path | None:
        commit = self._parts.recovery.commit
        return self._parts.trial.inside(commit.directory) if commit is not None else None

    # Weights

    async def published(self, version: PolicyVersion) -> PublishedWeights:
        """What is said of the present weights to whoever generates.

        Guarantee: their digest is known from those who wrote them, or from the commit, which names the manifest of the
        whole checkpoint; it is not that of whatever is in the directory now.
        """
        digest = self._written.digest if self._written is not None else await self._disk.run(self._committed_digest)
        return PublishedWeights(version=str(version), weights=str(self.weights), digest=digest)

    def _committed_digest(self) -> str | None:
        checkpoint, commit = self._checkpoint(), self._parts.recovery.commit
        if checkpoint is None or commit is None:
            return None
        return read_manifest(checkpoint, commit.manifest_digest).files[f"{WEIGHTS}/{MANIFEST_NAME}"].digest

    @property
    def damage(self) -> str:
        """What a commit has found to be wrong with the present weights; empty if nothing was."""
        return self._damage[1] if self._damage is not None and self._damage[0] == self.weights else ""

    async def write_first_version(self, version: PolicyVersion) -> None:
        """Write what the trial starts from, where no directory has it and nothing is committed yet."""
        if self._parts.spec.writes_first_version and self._checkpoint() is None:
            await self.write_weights(version)

    async def write_weights(self, version: PolicyVersion, *, copy: int = 0) -> None:
        """Write the published role's weights; when they have their manifest they may be published.

        Args:
            copy: which one it is of this version, whose files from before are not to be trusted.
        """
        parts = self._parts
        # Version 0 is of no epoch, and may be written by several: each has a folder that only it writes into.
        directory = parts.trial.weights_path / weights_name(version._replace(epoch=parts.writer.epoch), copy=copy)
        await self._disk.run(directory.mkdir, mode=0o700)
        with parts.presence.during("write weights", waits_for=parts.gang.workers, deadline_s=parts.step_timeout_s):
            files = await parts.gang.save_weights(self._published_role, directory, base=None if copy else self._base())
            self._written = await self._disk.run(self._seal, directory, files, version)

    def _base(self) -> Path | None:
        """What deltas lead from, where they are wanted: the version that the present weights were trained from.

        Guarantee: it is of the lineage, since it is what this epoch wrote last, or what it began with. A model's own
        directory has no manifest, and what is trained from it no deltas.
        """
        is_sealed = self._written is not None or self._checkpoint() is not None
        return self.weights if self._parts.spec.writes_deltas and is_sealed else None

    def _seal(self, directory: Path, files: Mapping[str, FileEntry], version: PolicyVersion) -> SealedDirectory:
        self._parts.writer.check()  # a master that was replaced publishes nothing: its successor has the say
        return write_manifest(directory, files, {"version": str(version)})

    # Commits

    async def begin_commit(self, step: int, version: PolicyVersion) -> CommitMoment:
        """Take what a commit stands for as it is now; when this returns, training may go on.

        Guarantee: the ledger, the lines, the published weights and what the ranks have copied are of one moment, since
        nothing is trained, dropped or published until all of them are taken.
        """
        checkpoint = await self._disk.run(
            CheckpointWriter, self._parts.trial, epoch=self._parts.writer.epoch, step=step
        )
        *_, moment = await all_or_first_error(
            *[self._begin_save(checkpoint, role) for role in self._roles],
            self._disk.run(self._take_moment, checkpoint, version),
        )
        assert isinstance(moment, CommitMoment), moment
        return moment

    async def _begin_save(self, checkpoint: CheckpointWriter, role: str) -> None:
        state = await self._disk.run(checkpoint.folder, state_folder(role))
        weights = None
        if not self._is_written(role):
            weights = await self._disk.run(checkpoint.folder, self._weights_folder(role))
        copies = self._parts.spec.control.commit_beside_training
        await self._parts.gang.begin_save(role, state, weights, copies=copies)

    def _is_written(self, role: str) -> bool:
        return role == self._published_role and self._written is not None

    def _take_moment(self, checkpoint: CheckpointWriter, version: PolicyVersion) -> CommitMoment:
        parts, epoch, step = self._parts, self._parts.writer.epoch, checkpoint.step
        if self._written is not None:
            checkpoint.link(WEIGHTS, self._written)
        checkpoint.add_ledger(parts.ledger.whole(epoch=epoch, step=step))
        return CommitMoment(
            checkpoint=checkpoint,
            version=version,
            delta=parts.ledger.delta_for(epoch=epoch, step=step),
            extra={"version": str(version), _LINE_SIZES: msgspec.to_builtins(self._lines.seal())},
            published=self._written,
        )

    async def finish_commit(self, moment: CommitMoment) -> Mapping[str, str]:
        """Wait until the ranks have written what they copied, and name it in the trial log.

        Returns:
            What the file system said, by worker, if any could not write, and what is wrong with the published weights;
            then nothing was named, and nothing is left.
        """
        gang, checkpoint = self._parts.gang, moment.checkpoint
        written = dict(zip(self._roles, await all_or_first_error(*map(gang.written, self._roles)), strict=True))
        problems = {worker: text for one in written.values() for worker, text in one.problems.items()}
        if moment.published is not None and not problems:
            problems = await self._problem_of(moment.published)
        if problems:
            await self._disk.run(checkpoint.give_up)
            return problems
        for role, one in written.items():
            checkpoint.add(state_folder(role), one.state)
            if one.weights:
                folder = self._weights_folder(role)
                sealed = await self._disk.run(self._seal, checkpoint.path / folder, one.weights, moment.version)
                checkpoint.add(folder, sealed.files)
        await self._disk.run(self._append_commit, moment)
        self._parts.ledger.mark_committed(moment.delta)
        self.committed_step = checkpoint.step
        return {}

    async def _problem_of(self, published: SealedDirectory) -> dict[str, str]:
        """What is wrong with weights that a commit is about to name, under a word for who says so; read as a whole.

        Guarantee: what an entry of the trial log names was written for it, or was right when it was read for it.
        """
        is_over, beat = threading.Event(), self._parts.presence.beat

        def on_progress() -> None:
            if is_over.is_set():  # a thread cannot be cancelled, and this may read for minutes
                raise InterruptedError("nobody waits for this commit any more")
            beat()

        try:
            await asyncio.to_thread(verify_manifest, published.path, published.digest, on_progress=on_progress)
        except CorruptCheckpointError as error:
            self._damage = (published.path, str(error))
            return {"the published weights are damaged": str(error)}
        finally:
            is_over.set()
        return {}

    def _append_commit(self, moment: CommitMoment) -> None:
        parts, checkpoint, delta = self._parts, moment.checkpoint, moment.delta
        digest = checkpoint.write_manifest(moment.extra)
        ledger_file, ledger_digest = write_delta(parts.trial, delta)
        parts.writer.commit(
            step=checkpoint.step,
            directory=checkpoint.relative_path,
            manifest_digest=digest,
            ledger_file=ledger_file,
            ledger_digest=ledger_digest,
            trained=delta.trained_count,
            dropped=len(delta.dropped),
        )

    # Lines of metrics and samples

    async def add_metrics(self, step: int, stats: dict[str, float]) -> None:
        await self._disk.run(self._lines.add_metrics, step, stats)

    async def add_step(self, step: int, stats: dict[str, float], batch: Sequence[str]) -> None:
        """A train step's line, and one for each of its samples."""
        await self._disk.run(self._add_step, step, stats, batch)

    def _open_lines(self) -> StepLines:
        parts, commit = self._parts, self._parts.recovery.commit
        lines = StepLines(parts.trial.metrics_path, parts.trial.trajectories_path, epoch=parts.writer.epoch)
        if commit is None:
            lines.cut_back(LineSizes(metrics=0, trajectories=0))
        else:
            manifest = read_manifest(parts.trial.inside(commit.directory), commit.manifest_digest)
            lines.cut_back(msgspec.convert(manifest.extra[_LINE_SIZES], LineSizes))
        return lines

    def _add_step(self, step: int, stats: dict[str, float], batch: Sequence[str]) -> None:
        parts = self._parts
        parts.writer.check()  # the files are the present epoch's
        consumed = parts.ledger.trained_count + parts.ledger.dropped_count
        stats["data/epoch"] = consumed / parts.spec.num_prompts
        stats["data/samples_trained"] = float(parts.ledger.trained_count)
        stats["data/samples_dropped"] = float(parts.ledger.dropped_count)
        stats["data/samples_buffered"] = float(len(parts.buffer.samples) - len(batch))
        stats["data/duplicates"] = float(parts.buffer.duplicates)
        self._lines.add_metrics(step, stats)
        self._lines.add_samples(step, [parts.buffer.samples[uid] for uid in batch])

    # Exports, and what nobody needs any more

    async def export(self, name: str, version: PolicyVersion) -> None:
        """Keep a permanent copy of the present weights as exports/{name}."""
        await self._disk.run(self._export, name, version)

    def _export(self, name: str, version: PolicyVersion) -> None:
        target = self._parts.trial.exports_path / name
        if not self._remover.remove(target):
            target = target.with_name(f"{name}-{version}")
        if self._written is not None:
            link_weights(self._written, target)
        else:
            link_files(self.weights, target)
        self._parts.journal.append("weights_exported", version=str(version), directory=str(target))

    async def remove_old_checkpoints(self) -> None:
        parts = self._parts
        in_use = await asyncio.to_thread(parts.weights_in_use)
        if in_use is None:
            return
        # Servers start from the weights of a commit after every start of the trainer.
        read_now = {
            parts.trial.relative(path.parent) for path in in_use if path.parent.parent == parts.trial.checkpoints_path
        }
        await self._disk.run(
            collect_garbage,
            parts.trial,
            parts.writer.state,
            epoch=parts.writer.epoch,
            keep=parts.spec.control.keep_commits,
            protect=read_now,
            remover=self._remover,
        )

    async def remove_old_weights(self, present: PolicyVersion) -> None:
        parts = self._parts
        in_use = await asyncio.to_thread(parts.weights_in_use)
        if in_use is not None:
            await self._disk.run(
                remove_old_weights,
                parts.trial.weights_path,
                parts.lineage,
                present=present,
                in_use=in_use,
                remover=self._remover,
            )

    # Roles

    @property
    def _roles(self) -> list[str]:
        """Those that are trained."""
        return list(self._parts.spec.initial_weights)

    @property
    def _published_role(self) -> str:
        return self._parts.spec.published_role

    def _weights_folder(self, role: str) -> str:
        return WEIGHTS if role == self._published_role else weights_folder(role)
