"""One trainer epoch: from a claim in the trial log to the end of the run, a stop, or the loss of a model worker.

    initialize from the last commit ──► publish its weights ──► evaluate (when due)
         ┌───────────────────────────────────────────────────────────┘
         ▼
    wait for a batch ──► run the dataflow graph ──► write weights ──► metrics ──► commit (when due) ──► publish ──┐
         ▲                  │ loss not finite                                                                  │
         ├── samples go back, nothing is written; too often in a row: NotFiniteError                           │
         └──────────────── evaluate (when due) ◄── free the samples ◄──────────────────────────────────────────┘

What counts is decided through the LogWriter of this epoch: once a later epoch has claimed the log, it raises, and this
one ends without a trace in it. Files are looked at and written in a thread (`Disk`), never in the event loop.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.trial.directory import TrialDirectory, link_files
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log import LogWriter
from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.policy_version import Lineage, PolicyVersion
from corral.workers.checkpoint.checkpoint import (
    CheckpointWriter,
    RecoveryPoint,
    collect_garbage,
    read_manifest,
    write_manifest,
)
from corral.workers.checkpoint.ledger import Ledger, write_delta, write_whole
from corral.workers.lifecycle.presence import Presence
from corral.workers.master.disk import Disk, LogWatch
from corral.workers.master.metrics import LineSizes, StepLines
from corral.workers.master.old_weights import remove_old_weights, weights_name
from corral.workers.master.sample_source import SampleSource
from corral.workers.master.sequence_buffer import SequenceBuffer
from corral.workers.master.trainer_gang import TrainerGang
from corral.workers.requests.messages import TrainReply

logger = logging.getLogger(__name__)

_LINE_SIZES = "lines"  # in a checkpoint's manifest


class Outcome(Enum):
    COMPLETE = "complete"
    STOPPED = "stopped"


class NotFiniteError(RuntimeError):
    """Loss or gradient was not finite too often in a row: only weights from before can still be trained."""


@dataclass(frozen=True, kw_only=True)
class EpochParts:
    """What an epoch works with."""

    spec: MasterWorkerSpec
    trial: TrialDirectory
    presence: Presence
    journal: Journal
    gang: TrainerGang
    writer: LogWriter
    recovery: RecoveryPoint
    ledger: Ledger
    lineage: Lineage
    buffer: SequenceBuffer
    source: SampleSource
    publish: Callable[[PolicyVersion, Path], None]
    """Make weights known to the generation-server manager."""
    weights_in_use: Callable[[], frozenset[Path] | None]
    """Directories of weights that generation servers are reading; None if nobody knows at the moment."""
    step_timeout_s: float


class TrainerEpoch:
    """Trains from the last commit on; `run` returns how it ended."""

    def __init__(self, parts: EpochParts) -> None:
        self._parts = parts
        self._step = parts.recovery.commit.step if parts.recovery.commit else 0
        self._committed_step = self._step
        self._evaluated_step: int | None = None
        self._nonfinite_in_a_row = 0
        self._skipped_updates = 0
        self._committing_s = 0.0
        self._disk = Disk()
        self._watch = LogWatch(self._disk, parts.writer, parts.trial, on_news=parts.gang.news.set)
        self._weights: Path = self._initial_weights()

    @property
    def version(self) -> PolicyVersion:
        """The weights that the model workers hold."""
        return self._parts.lineage.version(self._step)

    async def run(self) -> Outcome:
        """Train until the run is complete or a stop is asked for.

        Raises:
            SupersededError, StoppedError: another process decides about the trial now.
            GangLostError: a model worker is gone; a new epoch has to start from the last commit.
            NotFiniteError: the same, because the present weights or samples give no finite loss.
        """
        async with self._disk, self._watch:
            return await self._run()

    async def _run(self) -> Outcome:
        parts = self._parts
        self._lines = await self._disk.run(self._open_lines)
        state = parts.trial.inside(parts.recovery.commit.directory) if parts.recovery.commit else None
        with parts.presence.during("initialize", waits_for=parts.gang.workers, deadline_s=None):
            await parts.gang.initialize(step=self._step, weights=self._weights, state=state)
        parts.publish(self.version, self._weights)
        parts.presence.enter("train")
        parts.presence.beat(version=str(self.version))
        while not self._is_complete():
            await self._evaluate_if_due()
            batch = await self._next_batch()
            if batch is None:
                return await self._stop()
            await self._train(batch)
        await self._evaluate_if_due(last=True)
        await self._commit_if_due(force=True)
        await self._disk.run(self._export, "final")
        await self._disk.run(parts.writer.done)
        return Outcome.COMPLETE

    # What is left

    def _remaining(self) -> int:
        spec, ledger = self._parts.spec, self._parts.ledger
        return spec.num_prompts * spec.control.total_train_epochs - ledger.trained_count - ledger.dropped_count

    def _is_complete(self) -> bool:
        max_steps = self._parts.spec.control.max_steps
        return self._remaining() <= 0 or (max_steps is not None and self._step >= max_steps)

    # One step

    async def _next_batch(self) -> list[str] | None:
        """The uids of the next batch; None if the trial is asked to stop, or the last prompts were dropped."""
        parts, source, news = self._parts, self._parts.source, self._parts.gang.news
        while True:
            news.clear()  # before all looks: what happens after one of them ends the wait below
            self._watch.check()
            parts.gang.check_alive()
            if self._watch.stop_requested:
                return None
            batch = await source.poll(version=self._step, remaining=self._remaining())
            if batch is not None or self._is_complete():
                return batch or []
            parts.presence.enter("wait for a batch", waiting_for=source.waiting_for(), waits_for=source.waits_for())
            # Woken by an arrival, a worker's death, or the log watch; at the latest by a rank that has nothing to say.
            await news.wait()

    async def _train(self, batch: list[str]) -> None:
        if not batch:
            return
        parts = self._parts
        started = time.monotonic()
        with parts.presence.during("train step", waits_for=parts.gang.workers, deadline_s=parts.step_timeout_s):
            reply = await parts.gang.run_step(batch, parts.buffer, step=self._step)
        if reply.num_nonfinite or reply.is_damaged:
            await self._note_nonfinite(reply, batch)
        else:
            self._nonfinite_in_a_row = 0
        if reply.is_skipped:
            await parts.source.give_back(batch)
            return
        trained = time.monotonic()
        self._step += 1
        parts.ledger.train(self._step, batch)
        await self._write_weights()
        saved = time.monotonic()
        timing = {"time/train_s": trained - started, "time/save_s": saved - trained + self._committing_s}
        await self._disk.run(self._write_lines, dict(reply.stats) | timing, batch)
        await self._commit_if_due()
        parts.publish(self.version, self._weights)
        self._committing_s = time.monotonic() - saved
        parts.presence.beat(version=str(self.version))
        await parts.gang.clear(parts.buffer.release(batch))
        await self._remove_old_weights()
        save_every = parts.spec.control.save_every_steps
        if save_every is not None and self._step % save_every == 0:
            await self._disk.run(self._export, f"step-{self._step:08d}")

    async def _note_nonfinite(self, reply: TrainReply, batch: Sequence[str]) -> None:
        """Bound how long nothing is learned; a step of which only some mini-batches were finite counts, too."""
        parts, step = self._parts, self._step + 1
        self._skipped_updates += reply.num_nonfinite
        self._nonfinite_in_a_row += 1
        what = "left weights that are not finite" if reply.is_damaged else "had a loss or gradient that is not finite"
        cause = (
            f"train step {step} {what}, number {self._nonfinite_in_a_row} in a row; its batch begins with {batch[0]}"
        )
        logger.warning("%s", cause)
        await self._disk.run(parts.journal.append, "step_not_finite", epoch=parts.writer.epoch, step=step, cause=cause)
        if reply.is_damaged or self._nonfinite_in_a_row >= parts.spec.control.max_nonfinite_steps:
            raise NotFiniteError(cause)

    async def _evaluate_if_due(self, *, last: bool = False) -> None:
        every = self._parts.spec.eval_every_steps
        if every is None or (self._step % every != 0 and not last) or self._evaluated_step == self._step:
            return
        parts = self._parts
        with parts.presence.during("evaluate", waits_for=parts.gang.workers, deadline_s=parts.step_timeout_s):
            values = await parts.gang.evaluate(step=self._step)
        self._evaluated_step = self._step
        await self._disk.run(
            self._lines.add_metrics, self._step, {f"eval/{key}": value for key, value in values.items()}
        )

    # Durable writes

    def _initial_weights(self) -> Path:
        commit = self._parts.recovery.commit
        if commit is None:
            return self._parts.spec.initial_weights
        return self._parts.trial.inside(commit.directory) / "weights"

    def _open_lines(self) -> StepLines:
        """The files of metrics and samples, without what the commit that this epoch continues does not cover."""
        parts, commit = self._parts, self._parts.recovery.commit
        lines = StepLines(parts.trial.metrics_path, parts.trial.trajectories_path, epoch=parts.writer.epoch)
        if commit is None:
            lines.cut_back(LineSizes(metrics=0, trajectories=0))
        else:
            manifest = read_manifest(parts.trial.inside(commit.directory), commit.manifest_sha256)
            lines.cut_back(msgspec.convert(manifest.extra[_LINE_SIZES], LineSizes))
        return lines

    def _write_lines(self, stats: dict[str, float], batch: Sequence[str]) -> None:
        parts = self._parts
        parts.writer.check()  # the files are the present epoch's
        stats["data/samples_trained"] = float(parts.ledger.trained_count)
        stats["data/samples_dropped"] = float(parts.ledger.dropped_count)
        stats["data/samples_buffered"] = float(len(parts.buffer.samples) - len(batch))
        stats["data/duplicates"] = float(parts.buffer.duplicates)
        # With those that were tried since the last line, and changed nothing.
        stats["train/skipped_nonfinite"], self._skipped_updates = float(self._skipped_updates), 0
        self._lines.add_metrics(self._step, stats)
        self._lines.add_samples(self._step, [parts.buffer.samples[uid] for uid in batch])

    async def _write_weights(self) -> None:
        parts = self._parts
        directory = parts.trial.weights_path / weights_name(self.version)
        await self._disk.run(directory.mkdir, mode=0o700, exist_ok=True)
        with parts.presence.during("write weights", waits_for=parts.gang.workers, deadline_s=parts.step_timeout_s):
            await parts.gang.save_weights(directory)
            await self._disk.run(
                write_manifest, directory, {"version": str(self.version)}, on_progress=parts.presence.beat
            )
        self._weights = directory

    async def _commit_if_due(self, *, force: bool = False) -> None:
        control, parts = self._parts.spec.control, self._parts
        is_new = self._step > self._committed_step or parts.ledger.has_pending
        if not is_new or not (force or self._step % control.commit_every_steps == 0):
            return
        with parts.presence.during("commit", waits_for=parts.gang.workers, deadline_s=parts.step_timeout_s):
            checkpoint = await self._disk.run(CheckpointWriter, parts.trial, epoch=parts.writer.epoch, step=self._step)
            await parts.gang.save_state(checkpoint.path, step=self._step)
            await self._disk.run(self._commit, checkpoint)
        await self._remove_old_checkpoints()

    def _commit(self, checkpoint: CheckpointWriter) -> None:
        parts = self._parts
        link_files(self._weights, checkpoint.path / "weights")
        write_whole(checkpoint.path, parts.ledger.whole(epoch=parts.writer.epoch, step=self._step))
        extra: dict[str, Any] = {"version": str(self.version), _LINE_SIZES: msgspec.to_builtins(self._lines.seal())}
        digest = checkpoint.write_manifest(extra, on_progress=parts.presence.beat)
        delta = parts.ledger.delta_for(epoch=parts.writer.epoch, step=self._step)
        ledger_file, ledger_sha256 = write_delta(parts.trial, delta)
        parts.writer.commit(
            step=self._step,
            directory=checkpoint.relative_path,
            manifest_sha256=digest,
            ledger_file=ledger_file,
            ledger_sha256=ledger_sha256,
            trained=delta.trained_count,
            dropped=len(delta.dropped),
        )
        parts.ledger.mark_committed(delta)
        self._committed_step = self._step

    async def _stop(self) -> Outcome:
        """Commit what is trained and end the attempt in the log; `rl-submit --resume` goes on from there."""
        await self._commit_if_due(force=True)
        await self._disk.run(self._append_stop)
        return Outcome.STOPPED

    def _append_stop(self) -> None:
        request = self._parts.trial.read_stop_request()
        by, then = (request.by, request.then) if request else ("master_worker", "")
        self._parts.writer.stop(by=by, reason=f"checkpointed at step {self._committed_step}", then=then)

    def _export(self, name: str) -> None:
        """Keep a permanent copy of the present weights as exports/{name}."""
        target = self._parts.trial.exports_path / name
        if target.exists():
            shutil.rmtree(target)
        link_files(self._weights, target)
        self._parts.journal.append("weights_exported", version=str(self.version), directory=str(target))

    # What nobody needs any more

    async def _remove_old_checkpoints(self) -> None:
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
        )

    async def _remove_old_weights(self) -> None:
        parts = self._parts
        in_use = await asyncio.to_thread(parts.weights_in_use)
        if in_use is not None:
            await self._disk.run(
                remove_old_weights, parts.trial.weights_path, parts.lineage, present=self.version, in_use=in_use
            )
