"""Durable state: commits, of which at most one is in progress while training goes on, and the ledger of samples.

    step 7 ──begin──► ranks copy; ledger, lines, published weights as they are ──► step 8 ──► step 9 ──begin──► ...
                                │                                                                      │
                                └─ ranks write, fsync, hash ──► manifest ──► entry of the log ──settled┘
                                            └─ a disk says no ──► reported; the next commit covers these samples, too

What is committed is decided by the entry of the trial log alone: who dies before it leaves the commit before, whose
ledger has none of the steps since, and a directory that no entry names, which a later epoch removes.

The master writes nothing but manifests, ledgers and lines, and reads no file that a commit names: ranks hash each file
while they write it, and say its digest. Published weights that were damaged since are found by the servers that read
them (`workers/master/weights.py`), or by recovery, which then goes on from the commit before.
"""

import asyncio
import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from corral.experiments.config.control import KEPT_COMMITS
from corral.experiments.trial.spans import Span
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.checkpoint.checkpoint import (
    WEIGHTS,
    CheckpointWriter,
    collect_garbage,
    state_folder,
)
from corral.workers.checkpoint.ledger import Ledger, LedgerDelta, LedgerStates, write_delta
from corral.workers.checkpoint.manifest import read_manifest, write_manifest
from corral.workers.checkpoint.removal import Remover
from corral.workers.master.epoch import Epoch
from corral.workers.master.metrics import StepLines
from corral.workers.master.trainer_group import TrainerGroup
from corral.workers.master.weights import PublishedVersions
from corral.workers.requests.messages import TrainNotice
from corral.workers.streams.closing import AsyncClosing, all_or_first_error, cancel

_LINE_SIZES = "lines"  # in a checkpoint's manifest
_MOST_FAILURES = 3  # in a row; a disk that stays full must not let an hour of training pass for nothing


class CommitFailedError(RuntimeError):
    """What ranks have to write cannot be written, again and again: what is trained now would never count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitMoment:
    """The contents of a commit beside the files that ranks are writing: all of the moment in which it began."""

    checkpoint: CheckpointWriter
    states: LedgerStates
    """Of the ledger: all that is consumed."""
    delta: LedgerDelta
    """The part of it that was not committed before."""
    prompts: bytes
    """Of the prompts that follow from what was trained; nothing where none do."""
    extra: Mapping[str, Any]
    """Of the manifest."""


class Commits(AsyncClosing):
    """Begins commits, and says when they count.

    Example:
        async with Commits(epoch, trainer group, weights, ledger) as commits:
            commits.ledger.train(7, batch)
            await commits.begin(7, version)     # returns when all is copied
            ...                                 # steps 8 and 9
            commits.check()
            await commits.settle()              # step 7 is committed, or it is known why not
    """

    def __init__(
        self,
        epoch: Epoch,
        trainers: TrainerGroup,
        weights: PublishedVersions,
        ledger: Ledger,
        *,
        prompts: Callable[[], bytes] = bytes,
        say_head: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            prompts: gives what the checkpoint has to hold of the prompts that come next, beside the ledger.
            say_head: tells those who read the log that it has another head, so that they need not look for it.
        """
        self._epoch = epoch
        self._trainers = trainers
        self._weights = weights
        self._prompts = prompts
        self._say_head = say_head
        self._remover = Remover()
        self.ledger = ledger
        self.lines = StepLines(epoch.trial.metrics_path, epoch.trial.trajectories_path, epoch=epoch.writer.epoch)
        self.committed_step = self.begun_step = epoch.first_step
        self._in_flight: asyncio.Task[None] | None = None
        self._failed_in_a_row = 0
        self._lacks_room = False
        """Whether that was for want of room, the last time."""
        self._writing_s = 0.0

    async def close(self) -> None:
        """The epoch is over: what is on its way is left behind, unless its entry is being appended."""
        if self._in_flight is not None:
            await cancel(self._in_flight)

    def cut_lines(self) -> None:
        """Cut the lines back to what the commit covers that this epoch continues."""
        directory, commit = self._epoch.checkpoint, self._epoch.recovery.commit
        if directory is None or commit is None:
            self.lines.cut_back({})
        else:
            self.lines.cut_back(read_manifest(directory, commit.manifest_digest).extra[_LINE_SIZES])

    def covers(self, step: int) -> bool:
        """Whether all that was consumed up to this step is committed."""
        return step <= self.committed_step and not self.ledger.has_pending

    async def begin(self, step: int, version: PolicyVersion) -> None:
        """Take the present state, and let it be written; waits for the commit before, if that is not settled.

        Raises:
            as `settle`
        """
        await self.settle()
        epoch = self._epoch

        async def copy(role: str) -> None:
            state = await epoch.disk.run(checkpoint.folder, state_folder(role))
            weights = None
            if role != epoch.spec.published_role or self._weights.written is None:
                weights = await epoch.disk.run(checkpoint.folder, epoch.weights_folder(role))
            await self._trainers.begin_save(role, state, weights, copies=epoch.spec.control.commit_beside_training)

        # Guarantee: the ledger, the lines, the published weights and what the ranks copy are of one moment, since
        # nothing is trained, dropped or published until all of them are taken.
        with epoch.during("copy", self._trainers.workers):
            checkpoint = await epoch.disk.run(CheckpointWriter, epoch.trial, epoch=epoch.writer.epoch, step=step)
            *_, moment = await all_or_first_error(
                *map(copy, epoch.roles), epoch.disk.run(self._take_files, checkpoint, version)
            )
        self.begun_step = step
        self._in_flight = asyncio.create_task(self._write(moment))
        self._in_flight.add_done_callback(lambda _: self._trainers.news.set())

    async def settle(self) -> None:
        """Wait until nothing is on its way.

        Raises:
            CommitFailedError: no commit could be written for some time; OSError if that was for want of room, and then
                the master leaves, to begin again once there is some.
            TrainerGroupLostError: a model worker died, or did not end in time.
            SupersededError, StoppedError, DoneError: another process decides about the trial now.
        """
        if self._in_flight is None:
            return
        if not self._in_flight.done():
            with self._epoch.during("commit", self._trainers.still_writing()):
                await asyncio.wait([self._in_flight])
        task, self._in_flight = self._in_flight, None
        task.result()

    def check(self) -> None:
        """Costs nothing; raises what `settle` would, if that is known by now."""
        if self._in_flight is not None and self._in_flight.done():
            self._in_flight.result()

    def take_writing_s(self) -> float:
        """Seconds from the copy to the entry, of what was committed since this was last asked; 0.0 if nothing was."""
        writing_s, self._writing_s = self._writing_s, 0.0
        return writing_s

    # What it stands for

    def _take_files(self, checkpoint: CheckpointWriter, version: PolicyVersion) -> CommitMoment:
        if self._weights.written is not None:
            checkpoint.link(WEIGHTS, self._weights.written)
        return CommitMoment(
            checkpoint=checkpoint,
            states=self.ledger.states(),
            delta=self.ledger.delta_for(epoch=checkpoint.epoch, step=checkpoint.step),
            prompts=self._prompts(),
            extra={"version": str(version), _LINE_SIZES: self.lines.seal()},
        )

    # Until it counts

    async def _write(self, moment: CommitMoment) -> None:
        """Wait until the ranks have written their copies, and name the commit in the trial log; report a failure."""
        epoch, checkpoint, started = self._epoch, moment.checkpoint, time.monotonic()
        results = await all_or_first_error(*map(self._trainers.written, epoch.roles))
        written = dict(zip(epoch.roles, results, strict=True))
        self._lacks_room = any(one.lacks_room for one in results)
        if problems := {worker: text for one in results for worker, text in one.problems.items()}:
            await epoch.disk.run(checkpoint.give_up)
            await self._note_failure(checkpoint.step, problems)
            return
        for role, files in written.items():
            checkpoint.add(state_folder(role), files.state)
            if files.weights:
                folder, extra = epoch.weights_folder(role), {"version": moment.extra["version"]}
                sealed = await epoch.disk.run(write_manifest, checkpoint.path / folder, files.weights, extra)
                checkpoint.add(folder, sealed.files)
        await epoch.disk.run(self._append, moment)
        self.ledger.mark_committed(moment.delta)
        self.committed_step = checkpoint.step
        ended = time.monotonic()
        self._writing_s += ended - started
        span = Span(lane="commits", name=f"commit step {checkpoint.step}", start_s=started, end_s=ended)
        epoch.context.presence.record(span)
        if self._failed_in_a_row:
            self._failed_in_a_row = 0
            await self._tell(
                checkpoint.step, is_alarm=False, text=f"step {checkpoint.step} could be committed", causes=[]
            )
        await self._remove_old()

    def _append(self, moment: CommitMoment) -> None:
        checkpoint, delta = moment.checkpoint, moment.delta
        checkpoint.add_ledger(moment.states)
        if moment.prompts:
            checkpoint.add_prompts(moment.prompts)
        digest = checkpoint.write_manifest(moment.extra)
        ledger_file, ledger_digest = write_delta(self._epoch.trial, delta)
        self._epoch.writer.commit(
            step=checkpoint.step,
            directory=checkpoint.relative_path,
            manifest_digest=digest,
            ledger_file=ledger_file,
            ledger_digest=ledger_digest,
            trained=delta.trained_count,
            dropped=len(delta.dropped),
        )
        self._say_head(str(self._epoch.writer.state.head))

    async def _remove_old(self) -> None:
        epoch = self._epoch
        in_use = await asyncio.to_thread(self._weights.in_use)
        if in_use is None:
            return
        # Servers start from the weights of a commit after every start of the trainer.
        read_now = [path.parent for path in in_use if path.parent.parent == epoch.trial.checkpoints_path]
        await epoch.disk.run(
            collect_garbage,
            epoch.trial,
            epoch.writer.state,
            epoch=epoch.writer.epoch,
            keep=KEPT_COMMITS,
            protect=set(map(epoch.trial.relative, read_now)),
            remover=self._remover,
        )

    async def _note_failure(self, step: int, problems: Mapping[str, str]) -> None:
        self._failed_in_a_row += 1
        causes = [f"{worker}: {problem}" for worker, problem in sorted(problems.items())]
        text = f"step {step} could not be committed"
        await self._tell(step, is_alarm=True, text=text, causes=causes)
        if self._failed_in_a_row >= _MOST_FAILURES:
            text = f"{text}, as {_MOST_FAILURES} in a row could not: {causes[0]}"
            raise OSError(errno.ENOSPC, text) if self._lacks_room else CommitFailedError(text)

    async def _tell(self, step: int, *, is_alarm: bool, text: str, causes: list[str]) -> None:
        details = f"the last commit is that of step {self.committed_step}"
        notice = TrainNotice(topic="commit", is_alarm=is_alarm, text=text, details=details, causes=causes)
        await self._epoch.tell(notice, step=step)
