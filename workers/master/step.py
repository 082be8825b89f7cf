"""The step, from top to bottom: a batch, the calls of the graph on it, publication, a commit.

    initialize from the last commit ──► publish its weights ──► evaluate (when due)
         ┌───────────────────────────────────────────────────────────┘
         ▼
    batch ──► calls, of which one publishes ──► metrics ──► begin a commit (when due) ──► free the samples ──┐
         ▲      │ loss not finite                                                                            │
         ├── samples go back, nothing is written; too often in a row: NotFiniteError                         │
         └──────────────── evaluate (when due) ◄─────────────────────────────────────────────────────────────┘
                              by generation servers: only begun, and waited for before the first step and after the last

What is where is known by the source and its buffer, who computes by the trainer group and its calls (`StepRunner` runs
them in their order), what is durable by commits and weights; here they are asked in turn.

What counts is decided through the LogWriter of this epoch: once a later epoch has claimed the log, it raises, and this
one ends without a trace in it. Files are looked at and written in a thread (`Disk`), never in the event loop; a commit
is written beside the steps that follow it (`Commits`).
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum

import msgspec

from corral.experiments.trial.spans import STEPS, Span
from corral.scheduling.cadence import BEFORE_THE_RUN, Cadence, TrainingProgress
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.lifecycle.worker import CannotContinueError
from corral.workers.master.calls import MeshCalls
from corral.workers.master.commits import Commits
from corral.workers.master.disk import LogWatch
from corral.workers.master.epoch import Epoch, check_reallocations
from corral.workers.master.evaluations import Evaluations
from corral.workers.master.sample_source import Drops, SampleSource, mean_scalars
from corral.workers.master.step_order import StepOutcome, StepRunner
from corral.workers.master.trainer_group import TrainerGroup
from corral.workers.master.weights import PublishedVersions
from corral.workers.requests.messages import TrainNotice

logger = logging.getLogger(__name__)

MAX_NONFINITE_STEPS = 3
"""Train steps in a row whose loss or gradient is not finite, after which training goes back to the last commit; if as
many follow again without a commit in between, the trial fails."""
_DROPPED = "dropped prompts"  # topic of its alarm
_DROPPED_BATCHES = 4  # that were dropped without a train step: more than 80% of the prompts
_LOOK_INTERVAL_S = 1.0  # a server that refuses a version has read all of it twice before


class Outcome(Enum):
    COMPLETE = "complete"
    STOPPED = "stopped"


class NotFiniteError(RuntimeError):
    """Loss or gradient was not finite too often in a row: only weights from before can still be trained."""


@dataclass(kw_only=True)
class TrainerEpoch:
    """Trains from the last commit on; `run` returns how it ended."""

    epoch: Epoch
    source: SampleSource
    trainers: TrainerGroup
    calls: MeshCalls
    evaluations: Evaluations
    weights: PublishedVersions
    commits: Commits
    drops: Drops

    def __post_init__(self) -> None:
        epoch = self.epoch
        self._buffer = self.calls.buffer
        self._ledger = self.commits.ledger
        self._watch = LogWatch(epoch.disk, epoch.writer, epoch.trial, on_news=self.trainers.news.set)
        self._step = epoch.first_step
        self._step_since = time.monotonic()
        self._nonfinite_in_a_row = 0
        self._waits = defaultdict[str, float](float)
        """Since the last step's line: seconds, and updates that changed nothing, by metric."""
        now, control = self._progress(), epoch.spec.control
        # What this epoch begins with is committed and exported, and was perhaps not evaluated: the line may be cut off.
        # Beside training one may have been lost that was due before: an epoch begins with another one.
        step = BEFORE_THE_RUN if self.evaluations.are_by_servers else now.step - 1
        begin = replace(now, step=step, passes=now.passes if self._step else BEFORE_THE_RUN)
        self._evaluations_due = Cadence(epoch.spec.evaluate_every, last=begin)
        self._commits_due = Cadence(control.commit_frequency, last=now)
        self._exports = Cadence(control.save_frequency, last=now)

    @property
    def version(self) -> PolicyVersion:
        """The weights that the model workers hold."""
        return self.epoch.lineage.version(self._step)

    async def run(self) -> Outcome:
        """Train until the run is complete or a stop is asked for.

        Raises:
            SupersededError, StoppedError: another process decides about the trial now.
            TrainerGroupLostError: a model worker is gone; a new epoch has to start from the last commit.
            NotFiniteError: the same, because the present weights or samples give no finite loss.
            CannotContinueError: no step was trained, since all prompts were dropped.
            CommitFailedError: the same, because what is trained cannot be written.
        """
        epoch = self.epoch
        async with self._watch, self.commits, self.evaluations:
            await self._begin()
            while not self._is_complete():
                await self._evaluate_if_due()
                batch = await self._next_batch()
                if batch is None:
                    return await self._stop()
                if not batch:
                    continue  # the last prompts were dropped

                # The calls of the graph; one of them publishes the weights that it has made.
                started = time.monotonic()
                with epoch.during("train step", self.trainers.workers):
                    outcome = await StepRunner(
                        epoch.graph,
                        self.calls,
                        batch,
                        version=self._step,
                        publish=self._publish,
                        on_progress=self._show,
                        record=epoch.context.presence.record,
                    ).run()
                for notice in outcome.notices:
                    await epoch.tell(notice, step=self._step + 1)
                for uid, reason in outcome.dropped.items():
                    self.drops(uid, reason)
                self._free(outcome.dropped)
                batch = [uid for uid in batch if uid not in outcome.dropped]
                if not outcome.by_call:
                    continue  # nothing is left of the batch
                if outcome.num_nonfinite or outcome.is_damaged:
                    await self._note_nonfinite(outcome, batch)
                else:
                    self._nonfinite_in_a_row = 0
                if outcome.is_skipped:
                    await self.source.give_back(batch)
                    continue

                # What the calls learned counts from here on: it is in the ledger, and in the next commit.
                self._step += 1
                self._ledger.train(self._step, batch)
                self.drops.since_step.clear()
                await epoch.end_alarm(_DROPPED, "a train step has its prompts again", step=self._step)
                await self.source.note_trained(batch)
                spent = self._take_waits()
                spent["time/train_s"] = time.monotonic() - started - spent["time/publish_s"]
                spent["data/transfer_bytes"] = float(self.calls.end_step())
                await epoch.disk.run(self._add_lines, outcome.metrics() | spent, batch)
                started = time.monotonic()
                if not self.commits.covers(self._step) and self._commits_due.is_due(self._progress()):
                    await self.commits.begin(self._step, self.version)
                    self._commits_due.note(self._progress())
                self._waits["time/commit_s"] += time.monotonic() - started
                epoch.context.presence.beat(version=str(self.version))

                # What nobody needs any more goes; what is to stay is exported.
                self._free(batch)
                await self.weights.remove_old(self.version)
                if self._exports.is_due(now := self._progress()):
                    await self.weights.export(f"step-{self._step:08d}", self.version)
                    self._exports.note(now)
                # Guarantee: the train steps of an epoch have no gaps; time spent in vain is part of the next step.
                start_s, self._step_since = self._step_since, time.monotonic()
                span = Span(
                    lane=STEPS, name=f"step {self._step}", start_s=start_s, end_s=self._step_since, step=self._step
                )
                epoch.context.presence.record(span)

            if not self._step:
                raise CannotContinueError(
                    f"nothing was trained: {self.drops.describe() or 'there are no prompts'}. Change the prompts, the "
                    "reward or the setting that drops them"
                )
            if not await self._evaluate_last():
                return await self._stop()
            await self._commit_all()
            await self.weights.export("final", self.version)
            await epoch.disk.run(epoch.writer.done)
            return Outcome.COMPLETE

    async def _begin(self) -> None:
        """Let the ranks load the last commit, and publish it; models that do not fit together are refused."""
        epoch, trainers, presence = self.epoch, self.trainers, self.epoch.context.presence
        await epoch.disk.run(self.commits.cut_lines)
        with presence.during("initialize", waits_for=trainers.workers, deadline_s=None):
            models = await trainers.initialize(
                step=self._step, weights=epoch.initial_weights, states=epoch.initial_states
            )
        check_reallocations(epoch.graph, models)
        await epoch.note("models_loaded", models={name: msgspec.to_builtins(model) for name, model in models.items()})
        await self.weights.publish_first(self.version)
        presence.enter("train")
        presence.beat(version=str(self.version))
        self._step_since = time.monotonic()

    # A batch

    async def _next_batch(self) -> list[str] | None:
        """The uids of the next batch; None if the trial is asked to stop, or the last prompts were dropped."""
        source = self.source
        while True:
            if await self._is_to_stop():
                return None
            batch = await source.poll(version=self._step, remaining=self._remaining())
            if batch is not None or self._is_complete():
                self.epoch.context.presence.enter("train")
                return batch or []
            producers = source.waits_for()
            waiting_for = "; ".join(filter(None, [source.waiting_for(), self.drops.describe()]))
            self.epoch.context.presence.enter("wait for a batch", waiting_for=waiting_for, waits_for=producers)
            await self._tell_dropped()
            started = time.monotonic()
            await self._wait_for_news()
            for kind in {worker.partition("/")[0] for worker in producers} or {"dataset"}:
                self._waits[f"time/wait_s/{kind}"] += time.monotonic() - started

    async def _tell_dropped(self) -> None:
        """An alarm where so many prompts were dropped that no batch comes together."""
        dropped = self.drops.since_step.total()
        if dropped < _DROPPED_BATCHES * self.epoch.spec.train_batch_size or _DROPPED in self.epoch.alarms:
            return
        identity = self.epoch.context.plan.trial
        name = f"{identity.experiment}/{identity.trial}"
        notice = TrainNotice(
            topic=_DROPPED,
            is_alarm=True,
            text=self.drops.describe(),
            details=f"a train step needs {self.epoch.spec.train_batch_size} prompts",
            causes=[f"the reward is the same for all answers, or fails: rl-samples {name} --dropped, rl-logs {name}"],
        )
        await self.epoch.tell(notice, step=self._step + 1)

    async def _is_to_stop(self) -> bool:
        """Whether somebody asks for it; what else has happened and ends this epoch is raised."""
        self.trainers.news.clear()  # before all looks: what happens after one of them ends the next wait for news
        self._watch.check()
        self.commits.check()
        self.trainers.check_alive()
        self.evaluations.check()
        await self._publish_again_if_damaged()
        return self._watch.stop_requested

    async def _wait_for_news(self) -> None:
        """Of an arrival, a worker's death, the log watch, an evaluation; of what servers refuse it has to ask."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.trainers.news.wait(), _LOOK_INTERVAL_S)

    async def _publish_again_if_damaged(self) -> None:
        """Where the present version is committed, or about to be, so is its damage: then it is committed once more."""
        begun = self.commits.begun_step
        if await self.weights.publish_again_if_damaged(self.version) and begun == self._step > 0:
            await self.commits.begin(self._step, self.version)

    # The calls on it

    async def _publish(self) -> None:
        """The present step has made weights: they go to the generation servers before the step is over."""
        started = time.monotonic()
        await self.weights.publish(self.epoch.lineage.version(self._step + 1))
        self._waits["time/publish_s"] += time.monotonic() - started

    def _free(self, uids: Sequence[str] | Mapping[str, str]) -> None:
        """Let the ranks forget samples that are trained on, or dropped."""
        if uids:
            self.trainers.clear(self._buffer.release(uids))

    def _show(self, running: Sequence[str], waits_for: Mapping[str, Sequence[str]]) -> None:
        """Say in rl-status which calls run, and which wait for which."""
        waiting = [f"{call} waits for {', '.join(others)}" for call, others in waits_for.items() if others]
        graph, context = self.epoch.graph, self.epoch.context
        ranks = {rank for call in running for rank in self.calls.ranks_of(graph.call(call))}
        context.presence.enter(
            "train step",
            waiting_for="; ".join([*running, *waiting]),
            waits_for=[self.trainers.workers[rank] for rank in sorted(ranks)],
            deadline_s=context.plan.supervision.step_timeout_s,
        )

    async def _note_nonfinite(self, outcome: StepOutcome, batch: Sequence[str]) -> None:
        """Bound how long nothing is learned; a step of which only some mini-batches were finite counts, too."""
        step = self._step + 1
        self._waits["train/skipped_nonfinite"] += outcome.num_nonfinite
        self._nonfinite_in_a_row += 1
        what = "left weights that are not finite" if outcome.is_damaged else "had a loss or gradient that is not finite"
        who = f" ({', '.join(outcome.skipping)} learned nothing, the others did)" if outcome.is_torn else ""
        cause = (
            f"train step {step} {what}{who}, number {self._nonfinite_in_a_row} in a row; its batch begins with "
            f"{batch[0]}"
        )
        logger.warning("%s", cause)
        await self.epoch.note("step_not_finite", step=step, cause=cause)
        is_too_often = self._nonfinite_in_a_row >= MAX_NONFINITE_STEPS
        if outcome.is_damaged or outcome.is_torn or is_too_often:
            await self.commits.settle()  # what it holds was finite, and is where training goes back to
            raise NotFiniteError(cause)

    # What it left

    def _take_waits(self) -> dict[str, float]:
        """Seconds since the last step's line: without a batch, for want of which kind of worker, and for commits.

        With them the updates that were tried meanwhile, and changed nothing.
        """
        waits, self._waits = self._waits, defaultdict[str, float](float)
        always = dict.fromkeys(("time/commit_s", "time/publish_s", "train/skipped_nonfinite"), 0.0)
        waited_s = sum(value for name, value in waits.items() if name.startswith("time/wait_s/"))
        return {**always, **waits, "time/wait_s": waited_s, "time/save_s": self.commits.take_writing_s()}

    def _add_lines(self, stats: dict[str, float], batch: Sequence[str]) -> None:
        """A train step's line, and one for each of its samples."""
        self.epoch.writer.check()  # the files are the present epoch's
        samples = self._buffer.samples
        stats["data/epoch"] = self._ledger.consumed_count / self.epoch.spec.num_prompts
        stats["data/samples_trained"] = float(self._ledger.trained_count)
        stats["data/samples_dropped"] = float(self._ledger.dropped_count)
        stats["data/samples_buffered"] = float(len(samples) - len(batch))
        stats["data/duplicates"] = float(self._buffer.duplicates)
        stats |= {name: float(number) for name, number in self.drops.counts.items()}
        stats |= mean_scalars(samples[uid] for uid in batch)
        self.commits.lines.add_metrics(self._step, stats)
        self.commits.lines.add_samples(self._step, [samples[uid] for uid in batch])

    async def _evaluate_if_due(self) -> None:
        if self._evaluations_due.is_due(self._progress()):
            await self._evaluate()
            if not self._step:  # what training begins with is known by the initial weights alone
                await self._wait_for_servers()

    async def _evaluate_last(self) -> bool:
        """After the last step; whether all is evaluated, and no stop was asked for before."""
        if not await self._wait_for_servers():
            return False
        if self._evaluations_due.last.step != self._step:
            await self._evaluate()
        return await self._wait_for_servers()

    async def _evaluate(self) -> None:
        """By generation servers, where that is only begun, unless they are at one; or by the ranks."""
        now = self._progress()
        if not self.evaluations.is_running:
            await self.evaluations.begin(self.version)
            self._evaluations_due.note(now)

    async def _wait_for_servers(self) -> bool:
        """Until no evaluation is on its way; False where the trial is to stop before."""
        presence, workers = self.epoch.context.presence, self.epoch.context.workers("rollout_worker")
        while self.evaluations.is_running:
            if await self._is_to_stop():
                return False
            presence.enter("evaluate", waiting_for=self.evaluations.progress, waits_for=workers)
            await self._wait_for_news()
        self.evaluations.check()
        return True

    # A commit

    async def _commit_all(self) -> None:
        """Commit whatever is not, and wait for it."""
        await self.commits.settle()
        while not self.commits.covers(self._step):
            await self.weights.publish_again_if_damaged(self.version)
            await self.commits.begin(self._step, self.version)
            await self.commits.settle()  # raises once too many have failed

    async def _stop(self) -> Outcome:
        """Commit what is trained and end the attempt in the log; `rl-submit --resume` goes on from there."""
        await self._commit_all()
        await self.epoch.disk.run(self._append_stop)
        return Outcome.STOPPED

    def _append_stop(self) -> None:
        request = self.epoch.trial.read_stop_request()
        by, then = (request.by, request.then) if request else ("master_worker", "")
        reason = f"checkpointed at step {self.commits.committed_step}"
        self.epoch.writer.stop(by=by, reason=reason, then=then)

    # What is done, and what is left

    def _progress(self) -> TrainingProgress:
        passes = self._ledger.consumed_count // self.epoch.spec.num_prompts
        return TrainingProgress(step=self._step, passes=passes, time_s=time.monotonic())

    def _remaining(self) -> int:
        return self.epoch.spec.num_prompts * self.epoch.spec.control.total_train_epochs - self._ledger.consumed_count

    def _is_complete(self) -> bool:
        max_steps = self.epoch.spec.control.max_steps
        return self._remaining() <= 0 or (max_steps is not None and self._step >= max_steps)
