"""One trainer epoch: from a claim in the trial log to the end of the run, a stop, or the loss of a model worker.

    initialize from the last commit ──► publish its weights ──► evaluate (when due)
         ┌───────────────────────────────────────────────────────────┘
         ▼
    wait for a batch ──► run the dataflow graph, which publishes ──► metrics ──► begin a commit (when due) ┐
         ▲                  │ loss not finite                                                                  │
         ├── samples go back, nothing is written; too often in a row: NotFiniteError                           │
         └──────────────── evaluate (when due) ◄── free the samples ◄──────────────────────────────────────────┘

What counts is decided through the LogWriter of this epoch: once a later epoch has claimed the log, it raises, and this
one ends without a trace in it. Files are looked at and written in a thread (`Disk`), never in the event loop; a commit
is written beside the steps that follow it (`Commits`).
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum

import msgspec

from corral.scheduling.cadence import BEFORE_THE_RUN, Cadence, Moment
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.master.commits import Commits
from corral.workers.master.disk import Disk, LogWatch
from corral.workers.master.durable_state import DurableState
from corral.workers.master.epoch_parts import EpochParts
from corral.workers.master.held_out import HeldOut
from corral.workers.master.loaded_models import check_reallocations, check_rows
from corral.workers.master.notices import tell
from corral.workers.master.republication import Republication
from corral.workers.master.step.calls import MeshCalls
from corral.workers.master.step.outcome import StepOutcome
from corral.workers.master.step.runner import Progress, StepRunner
from corral.workers.requests.messages import TrainNotice

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0  # a server that refuses a version has read all of it twice before


class Outcome(Enum):
    COMPLETE = "complete"
    STOPPED = "stopped"


class NotFiniteError(RuntimeError):
    """Loss or gradient was not finite too often in a row: only weights from before can still be trained."""


class TrainerEpoch:
    """Trains from the last commit on; `run` returns how it ended."""

    def __init__(self, parts: EpochParts) -> None:
        self._parts = parts
        self._step = parts.recovery.commit.step if parts.recovery.commit else 0
        self._nonfinite_in_a_row = 0
        self._skipped_updates = 0
        self._committing_s = self._saving_s = 0.0
        self._waited_s: dict[str, float] = {}
        self._disk = Disk()
        self._watch = LogWatch(self._disk, parts.writer, parts.trial, on_news=parts.gang.news.set)
        self._durable = DurableState(parts, self._disk)
        self._commits = Commits(parts, self._disk, self._durable)
        self._republication = Republication(parts, self._disk, self._durable)
        self._calls = MeshCalls(parts.spec, parts.graph, parts.gang, parts.buffer, parts.lineage, publish=self._publish)
        self._held_out = HeldOut(
            graph=parts.graph, calls=self._calls, holders=parts.gang, buffer=parts.buffer, row_ids=parts.held_out_rows
        )
        now = self._moment()
        # What this epoch begins with is committed and exported, and was perhaps not evaluated: the line may be cut off.
        begin = replace(now, step=now.step - 1, passes=now.passes if self._step else BEFORE_THE_RUN)
        self._evaluations = Cadence(parts.spec.evaluate_every, last=begin)
        self._commits_due = Cadence(parts.spec.control.commit_frequency, last=now)
        self._exports = Cadence(parts.spec.control.save_frequency, last=now)
        self._runner = StepRunner(parts.graph, self._calls, ranks_of=self._calls.ranks_of, on_progress=self._show)

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
            CommitFailedError: the same, because what is trained cannot be written.
        """
        async with self._disk, self._watch, self._commits:
            return await self._run()

    async def _run(self) -> Outcome:
        parts = self._parts
        await self._durable.open_lines()
        with parts.presence.during("initialize", waits_for=parts.gang.workers, deadline_s=None):
            await parts.gang.initialize(
                step=self._step, weights=self._durable.initial_weights, states=self._durable.initial_states
            )
        await self._look_at_what_was_loaded()
        await self._durable.write_first_version(self.version)
        parts.publish(await self._durable.published(self.version))
        parts.presence.enter("train")
        parts.presence.beat(version=str(self.version))
        while not self._is_complete():
            await self._evaluate_if_due()
            batch = await self._next_batch()
            if batch is None:
                return await self._stop()
            await self._train(batch)
        await self._evaluate_if_due(last=True)
        await self._commit_all()
        await self._durable.export("final", self.version)
        await self._disk.run(parts.writer.done)
        return Outcome.COMPLETE

    async def _look_at_what_was_loaded(self) -> None:
        """Ranks that hold something else than the plan says are refused before the first step."""
        parts = self._parts
        if parts.spec.source == "dataset":
            check_rows(await parts.gang.count_rows(), planned=parts.spec.num_prompts)
        models = await parts.gang.describe_models()
        check_reallocations(parts.graph, models)
        told = {name: msgspec.to_builtins(model) for name, model in models.items()}
        await self._disk.run(parts.journal.append, "models_loaded", epoch=parts.writer.epoch, models=told)

    # What is done, and what is left

    @property
    def _num_settled(self) -> int:
        """Prompts that were trained on or dropped, over all passes."""
        return self._parts.ledger.trained_count + self._parts.ledger.dropped_count

    def _moment(self) -> Moment:
        passes = self._num_settled // self._parts.spec.num_prompts
        return Moment(step=self._step, passes=passes, time_s=time.monotonic())

    def _remaining(self) -> int:
        return self._parts.spec.num_prompts * self._parts.spec.control.total_train_epochs - self._num_settled

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
            self._commits.check()
            parts.gang.check_alive()
            await self._publish_again_if_damaged()
            if self._watch.stop_requested:
                return None
            batch = await source.poll(version=self._step, remaining=self._remaining())
            if batch is not None or self._is_complete():
                return batch or []
            parts.presence.enter("wait for a batch", waiting_for=source.waiting_for(), waits_for=source.waits_for())
            started = time.monotonic()
            # Woken by an arrival, a worker's death, or the log watch; of what servers refuse it has to ask.
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), _LOOK_INTERVAL_S)
            for kind in {worker.partition("/")[0] for worker in source.waits_for()} or {"dataset"}:
                self._waited_s[kind] = self._waited_s.get(kind, 0.0) + time.monotonic() - started

    async def _train(self, batch: list[str]) -> None:
        if not batch:
            return
        parts = self._parts
        started, saved_before_s = time.monotonic(), self._saving_s
        with parts.presence.during("train step", waits_for=parts.gang.workers, deadline_s=parts.step_timeout_s):
            outcome = StepOutcome(parts.graph, await self._runner.run(batch, version=self._step))
        await self._tell(outcome.notices)
        batch = self._without_dropped(batch, outcome.result.dropped)
        if not outcome.by_call:
            return  # nothing is left of the batch
        if outcome.num_nonfinite or outcome.is_damaged:
            await self._note_nonfinite(outcome, batch)
        else:
            self._nonfinite_in_a_row = 0
        if outcome.is_skipped:
            await parts.source.give_back(batch)
            return
        self._step += 1
        parts.ledger.train(self._step, batch)
        publishing_s = self._saving_s - saved_before_s
        timing = {
            "time/train_s": time.monotonic() - started - publishing_s,
            "time/publish_s": publishing_s,
            "time/commit_s": self._committing_s,
            "time/save_s": self._commits.take_writing_s(),
            "data/transfer_bytes": float(self._calls.end_step()),
        }
        await self._durable.add_step(self._step, outcome.metrics() | timing | self._waited() | self._skipped(), batch)
        committing = time.monotonic()
        await self._commit_if_due()
        self._committing_s = time.monotonic() - committing
        parts.presence.beat(version=str(self.version))
        parts.gang.clear(parts.buffer.release(batch))
        await self._durable.remove_old_weights(self.version)
        if self._exports.is_due(now := self._moment()):
            await self._durable.export(f"step-{self._step:08d}", self.version)
            self._exports.note(now)

    async def _tell(self, notices: Sequence[TrainNotice]) -> None:
        """Pass on what the step found out: the log says it once, and rl-status as long as it holds."""
        for notice in notices:
            await tell(self._parts, self._disk, notice, step=self._step + 1)

    def _without_dropped(self, batch: list[str], dropped: Mapping[str, str]) -> list[str]:
        """The samples that were trained on; those that were given up on the way are counted, and go."""
        parts = self._parts
        if not dropped:
            return batch
        for uid, reason in dropped.items():
            parts.ledger.drop(uid, reason)
        parts.gang.clear(parts.buffer.release(dropped))
        return [uid for uid in batch if uid not in dropped]

    async def _publish(self) -> None:
        """Hand the weights that the present step has just made to whoever generates.

        Servers need not wait for the rest of the step, nor for the commit: if either never comes, these weights are
        orphans, and so is what is made with them. The lineage knows neither, and turns their samples away.
        """
        started = time.monotonic()
        version = self._parts.lineage.version(self._step + 1)
        await self._durable.write_weights(version)
        self._parts.publish(await self._durable.published(version))
        await self._republication.note_next(version)
        self._saving_s += time.monotonic() - started

    async def _publish_again_if_damaged(self) -> None:
        """Where the present version is committed, or about to be, so is its damage: then it is committed once more."""
        begun = max(self._durable.committed_step, self._commits.step)
        if await self._republication.publish_if_damaged(self.version) and begun == self._step > 0:
            await self._commits.begin(self._step, self.version)

    def _show(self, progress: Progress) -> None:
        """Say in rl-status which calls run, and which wait for which."""
        parts = self._parts
        waiting = [f"{call} waits for {', '.join(others)}" for call, others in progress.waiting.items() if others]
        ranks = {rank for call in progress.running for rank in self._calls.ranks_of(parts.graph.call(call))}
        parts.presence.enter(
            "train step",
            waiting_for="; ".join([*progress.running, *waiting]),
            waits_for=[parts.gang.workers[rank] for rank in sorted(ranks)],
            deadline_s=parts.step_timeout_s,
        )

    async def _note_nonfinite(self, outcome: StepOutcome, batch: Sequence[str]) -> None:
        """Bound how long nothing is learned; a step of which only some mini-batches were finite counts, too."""
        parts, step = self._parts, self._step + 1
        self._skipped_updates += outcome.num_nonfinite
        self._nonfinite_in_a_row += 1
        what = "left weights that are not finite" if outcome.is_damaged else "had a loss or gradient that is not finite"
        who = f" ({', '.join(outcome.skipping)} learned nothing, the others did)" if outcome.is_torn else ""
        cause = (
            f"train step {step} {what}{who}, number {self._nonfinite_in_a_row} in a row; its batch begins with "
            f"{batch[0]}"
        )
        logger.warning("%s", cause)
        await self._disk.run(parts.journal.append, "step_not_finite", epoch=parts.writer.epoch, step=step, cause=cause)
        is_too_often = self._nonfinite_in_a_row >= parts.spec.control.max_nonfinite_steps
        if outcome.is_damaged or outcome.is_torn or is_too_often:
            await self._commits.settle()  # what it holds was finite, and is where training goes back to
            raise NotFiniteError(cause)

    def _waited(self) -> dict[str, float]:
        """Seconds that training stood still for want of a batch since the last step, and for which kind of worker."""
        waited, self._waited_s = self._waited_s, {}
        return {"time/wait_s": sum(waited.values())} | {f"time/wait_s/{kind}": s for kind, s in waited.items()}

    def _skipped(self) -> dict[str, float]:
        """Updates that were tried since the last step's line, and changed nothing."""
        skipped, self._skipped_updates = self._skipped_updates, 0
        return {"train/skipped_nonfinite": float(skipped)}

    async def _evaluate_if_due(self, *, last: bool = False) -> None:
        parts, now = self._parts, self._moment()
        is_due = self._evaluations.is_due(now) or (last and self._evaluations.last.step != now.step)
        if not is_due or not parts.graph.evaluate_calls:
            return
        with parts.presence.during("evaluate", waits_for=parts.gang.workers, deadline_s=parts.step_timeout_s):
            for call in parts.graph.evaluate_calls:
                values = await self._held_out.evaluate(call, version=self._step)
                await self._durable.add_metrics(self._step, {f"eval/{key}": value for key, value in values.items()})
        self._evaluations.note(now)

    # The end of a step, and of the epoch

    async def _commit_if_due(self) -> None:
        is_new = self._step > self._durable.committed_step or self._parts.ledger.has_pending
        if is_new and self._commits_due.is_due(self._moment()):
            await self._commits.begin(self._step, self.version)
            self._commits_due.note(self._moment())

    async def _commit_all(self) -> None:
        """Commit whatever is not, and wait for it."""
        await self._commits.settle()
        while self._step > self._durable.committed_step or self._parts.ledger.has_pending:
            await self._republication.publish_if_damaged(self.version)
            await self._commits.begin(self._step, self.version)
            await self._commits.settle()  # raises once too many have failed

    async def _stop(self) -> Outcome:
        """Commit what is trained and end the attempt in the log; `rl-submit --resume` goes on from there."""
        await self._commit_all()
        await self._disk.run(self._append_stop)
        return Outcome.STOPPED

    def _append_stop(self) -> None:
        request = self._parts.trial.read_stop_request()
        by, then = (request.by, request.then) if request else ("master_worker", "")
        self._parts.writer.stop(by=by, reason=f"checkpointed at step {self._durable.committed_step}", then=then)
