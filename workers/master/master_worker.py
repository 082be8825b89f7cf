"""The master: the one process that knows where every sample stands, and says what runs next.

A whole asynchronous step:

      prompts of the data set                                                trial directory
              │                                                            ┌─────────────────────┐
              ▼            2 may it start?                                 │                     │
      ┌────────────────┐   3 which server?   ┌───────────────┐             │                     │
      │ rollout worker │◄───────────────────►│    manager    │◄──── 11 ────┤ log/                │
      │ 1 prompts      │                     └──┬─────────▲──┘             │                     │
      │ 4 generation:  │              at this   │         │                │                     │
      │   agent,       │  token ids   version ┌─▼───────┐ │                │                     │
      │   reward       │◄────────────────────►│ servers │◄┼──── reads ─────┤ weights/            │
      └───┬────────▲───┘  tokens back         └─────────┘ │                │                     │
     spool│        │ 6 verdicts                           │ 9 publish      │                     │
 5 deliver▼        │                                      │                │                     │
      ┌────────────┴───┐  6 what arrived     ┌────────────┴──┐  10 commit  │                     │
      │ model workers: ├────────────────────►│    master:    ├────────────►│ checkpoints/        │
      │   samples,     │◄────────────────────┤ what is where,│             │ ledger/ log/        │
      │   models       │  7 calls            │ what is next  │◄──── 12 ────┤                     │
      └───────┬────────┘                     └───────────────┘             │                     │
              └───────────────────────── 8 weights ───────────────────────►│ weights/            │
                                                                           └─────────────────────┘

    loop          consumes                 produces                waits for           unblocked by
     1 prompts    Allocation               a task for each group   2                   a new version, or a group's
                                                                                       end, opens the gate
     2 admission  all passes, Allocate,    prompts and their       a first version,    9; the Report of each rollout
                  Finish, Report           order numbers           all reports, room   worker; 9 or Finish
     3 routing    Schedule                 a server's URL          a server READY at   its update, and its own word
                                                                   this version        for the version that it holds
     4 generation a prompt, chunk by       a judged group, or why  3, the server, the  tokens; where none come, 3 is
                  chunk                    there is none           agent, the reward   asked again, and goes on
     5 deliver    records of the spool     records at one rank     room at a receiver  Grant, once 6 has taken others;
                                                                                       a new session offers all again
     6 fetch      what has arrived, or     a batch; verdicts on    rollout workers     5: a rank answers when something
                  rows of a data set       what cannot be in one                       is there, until enough of it is
                                                                                       fresh; rows are read at once
     7 calls      samples that have the    output keys; weights    its own inputs,     other calls of the step; replies
                  call's input keys        in memory               its own ranks       of the call's ranks; the death of
                                                                                       any rank leads to 12
     8 weights    the published role,      weights/vSTEP-eEPOCH,   its ranks, disk     WrittenReply of its ranks
                  once it has learned      under a manifest
     9 publish    the version, its path    a leased record; the    nobody              nothing; the manager looks for a
                                           updates of all servers                      version ten times a second
    10 commit     copies of shards, the    a checkpoint, and an    every rank, disk;   link(2) of the next slot; a later
                  ledger, when one is due  entry that names it     training for the    claim there ends this epoch
                                                                   copies only
    11 covered    new entries of the log   space in spools, room   the master          10; or a fall-back, after which
                                           at the gate                                 prompts are issued again
    12 recovery   the log, checkpoints     a claim, an epoch,      disk; all ranks     Hello of all ranks of one start,
                                           Initialize, sessions    of a trainer group           then OkReply of all

     1, 4   rollout/rollout_worker.py, group_maker.py, generation_client.py; engine/loop.py
     2, 3   manager/gserver_manager.py, admission.py, routing.py, servers.py, on the gate of scheduling/staleness.py
     5      delivery/: what is said in messages.py; spool.py, sender.py at rollout workers, receiver.py at
            model workers; where a record stands is decided by sender.py and receiver.py
     6      model/samples.py and data_store.py there, trainer_group.py and sample_source.py here, the rule in
            scheduling/staleness.py
     7      step_order.py: a coroutine for each call (whose inputs are there, whose ranks are free);
            calls.py: what a call consists of (who works on which samples, and what has to move);
            trainer_group.py, which asks the ranks. There model/model_worker.py, with
            models.py, data_plane.py, reallocation.py, which run algorithms/ on backends/fsdp/
     8, 10  step.py, weights.py, commits.py, which lets training go on meanwhile, checkpoint/;
            model/model_worker.py at the ranks, backends/files/weights.py for weights, train_state.py for what training
            resumes from, checkpoint/ledger.py, which refuses a sample twice, and
            experiments/trial/log.py, whose entries mean what log_state.py says
     9      `_publish` in step.py, manager/fleet.py
    11      checkpoint/checkpoint.py, followed by gserver_manager.py and rollout_worker.py
    12      `_main` and `_recover` below, trainer_group.py, checkpoint/checkpoint.py, backends/train_state.py;
            epoch.py: what the ranks have loaded, held against the plan

Held-out problems are dealt, answered and judged as prompts are (1 to 4), and what comes out goes to the manager in
place of 5. The master asks it for that beside 6 to 10 (evaluations.py).

1 to 5 and 11 go on all the time; the master goes through 6 to 10 batch by batch, and within a batch calls on ranks
apart from each other run at the same time, 8 and 9 of one role beside 7 of another. Epochs follow each other:

    trial log ──claim──► epoch ──► TrainerEpoch.run ──┬─► complete, stopped: leave
        ▲                                             ├─► a model worker died: next epoch, from the last commit
        │                                             └─► no finite loss: the same; twice from one commit: exit 77
        │
        └── every commit, stop and done; a later claim by another master ends this one (exit 75)

It holds metadata only and imports no torch.

Its garbage is collected by the amount that a step makes, not by that of a message. A step makes some hundred thousand
objects that live until its end: metadata, shares, replies. With Python's usual thresholds they, and every module that
is loaded, are searched for cycles many times a step, which is a third of what the master computes
(benchmarks/control_plane.py). Cycles are rare here: they come with exceptions.
"""

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import cached_property, partial

from corral.experiments.datasets.dataset import Dataset
from corral.experiments.trial.attempts import may_resume
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log import LogWriter, TrialLog, read_whole_log
from corral.experiments.trial.log_state import DoneError, StoppedError, SupersededError
from corral.experiments.worker_specs import (
    DatasetSpec,
    GserverManagerSpec,
    MasterWorkerSpec,
    ModelWorkerSpec,
)
from corral.name_resolve.base import Lease
from corral.scheduling.staleness import ReorderWindow
from corral.workers.checkpoint.checkpoint import (
    NoValidCheckpointError,
    RecoveryPoint,
    committed_ledger,
    last_valid_commit,
)
from corral.workers.checkpoint.ledger import Ledger, numbers_of
from corral.workers.checkpoint.published_weights import PublishedWeights
from corral.workers.data.prompts import PlannedPrompts
from corral.workers.lifecycle.worker import (
    CannotContinueError,
    StopRequested,
    SupersededWorkerError,
    TrainingNotFiniteError,
    Worker,
    WorkerContext,
    run_async,
)
from corral.workers.master.calls import MeshCalls
from corral.workers.master.commits import CommitFailedError, Commits
from corral.workers.master.dealt_prompts import DealtPrompts, open_dealt
from corral.workers.master.disk import Disk
from corral.workers.master.epoch import Epoch, standing_alarms
from corral.workers.master.evaluations import Evaluations
from corral.workers.master.sample_source import DatasetSource, Drops, SampleSource, SequenceBuffer, TrajectorySource
from corral.workers.master.step import NotFiniteError, Outcome, TrainerEpoch
from corral.workers.master.trainer_group import TrainerGroup, TrainerGroupLostError
from corral.workers.master.weights import PublishedVersions
from corral.workers.streams.errors import StaleEpochError

logger = logging.getLogger(__name__)

# Objects, more than a step keeps; younger collections before an older one is looked at.
_COLLECTION_THRESHOLDS = (500_000, 20, 20)


class MasterWorker(Worker):
    """Claims epochs and runs them until the trial is complete or stopped."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._spec = context.specification(MasterWorkerSpec)
        self._log = TrialLog(context.trial.log_path)
        self._journal = Journal(context.trial.journal_path)
        self._owner = f"{socket.gethostname()}:{os.getpid()}"
        self._leases: dict[str, Lease] = {}

    def run(self) -> None:
        try:
            with rare_collections():
                run_async(self._main(), self.context.stopping)
        except (SupersededError, StaleEpochError) as error:  # the log says so, or a model worker that has read it
            raise SupersededWorkerError(str(error)) from error
        except NoValidCheckpointError as error:
            raise CannotContinueError(str(error)) from error
        except DoneError:
            logger.info("the trial is complete")
        except StoppedError as error:
            logger.info("the trial was stopped: %s", error)

    async def _main(self) -> None:
        # What is slow to show on a network file system is waited for, and nobody needs this loop before the claim.
        read_whole_log(self.context.trial, self._log)
        resume = may_resume(self.context.trial, self.context.attempt, self._log)
        num_lost = 0
        taken_back_to: int | None = None
        while True:
            writer = self._log.claim(self._owner, resume=resume)
            resume = False  # only the first claim of an attempt may continue a stopped trial
            self._journal.tell("epoch_claimed", epoch=writer.epoch, worker=self.context.worker_id)
            try:
                async with TrainerGroup(self.context, self._spec, epoch=writer.epoch) as trainers:
                    outcome = await self._run_epoch(writer, trainers)
            except (TrainerGroupLostError, CommitFailedError, NotFiniteError) as error:
                logger.warning("epoch %d ends: %s", writer.epoch, error)
                self._journal.tell("epoch_lost", epoch=writer.epoch, cause=str(error))
                if not isinstance(error, NotFiniteError):
                    last = writer.state.last_commit
                    has_committed = last is not None and last.epoch == writer.epoch
                    num_lost = 1 if has_committed else num_lost + 1
                    self._require_progress(num_lost, str(error))
                elif taken_back_to == writer.state.head:
                    raise TrainingNotFiniteError(
                        f"{error}, and so it was before training went back to its last commit"
                    ) from error
                else:
                    taken_back_to = writer.state.head
                continue
            logger.info("the trial is %s", outcome.value)
            self._journal.tell("epoch_ended", epoch=writer.epoch, outcome=outcome.value)
            return

    def _require_progress(self, num_lost: int, cause: str) -> None:
        """Nobody else may count these: an epoch can end without the end of any process."""
        limit = self.context.plan.supervision.max_restarts
        if num_lost > limit:
            raise CannotContinueError(
                f"{num_lost} epochs in a row ended without a commit, more than supervision.max_restarts = {limit}; "
                f"the last one because {cause}"
            )

    async def _run_epoch(self, writer: LogWriter, trainers: TrainerGroup) -> Outcome:
        recovery = await self._recover(writer)
        ledger = await asyncio.to_thread(self._ledger_of, recovery)
        start = f"the commit of step {recovery.commit.step}" if recovery.commit else "the initial weights"
        logger.info("epoch %d goes on from %s", writer.epoch, start)
        async with Disk() as disk, AsyncExitStack() as stack:
            alarms = await disk.run(standing_alarms, self.context.trial, self.context.attempt)
            epoch = Epoch(
                context=self.context,
                spec=self._spec,
                writer=writer,
                recovery=recovery,
                disk=disk,
                journal=self._journal,
                alarms=alarms,
            )
            weights = PublishedVersions(epoch, trainers, publish=self._publish)
            say_head = partial(self._say, self.context.keys.committed())
            say_head(str(writer.state.head))
            say_prompts = partial(self._say, self.context.keys.prompts())
            dealt = await stack.enter_async_context(open_dealt(epoch, ledger, self._prompts, say=say_prompts))
            prompts = bytes if dealt is None else dealt.content
            commits = Commits(epoch, trainers, weights, ledger, prompts=prompts, say_head=say_head)
            buffer, drops = (
                SequenceBuffer(is_consumed=ledger.consumed),
                Drops(ledger.drop, self._dataset.config.sources),
            )
            calls = MeshCalls(self._spec, epoch.graph, trainers, buffer, epoch.lineage)
            return await TrainerEpoch(
                epoch=epoch,
                source=self._source(epoch, buffer, trainers, ledger, drops, dealt),
                trainers=trainers,
                calls=calls,
                evaluations=Evaluations(
                    epoch,
                    calls,
                    trainers,
                    weights,
                    commits.lines,
                    self._trainer.evaluation,
                    row_ids=self._held_out_rows(),
                ),
                weights=weights,
                commits=commits,
                drops=drops,
            ).run()

    async def _recover(self, writer: LogWriter) -> RecoveryPoint:
        """Find the newest commit that is whole; what is not is left behind in the log, where everyone reads it."""
        presence, stopping = self.context.presence, self.context.stopping

        def on_progress() -> None:
            if stopping.is_set():  # a thread cannot be cancelled, and its work may take many minutes
                raise StopRequested("while a checkpoint was verified")
            presence.beat()

        deadline_s = self.context.plan.supervision.setup_timeout_s
        with presence.during("verify the last commit", deadline_s=deadline_s):
            recovery = await asyncio.to_thread(
                last_valid_commit, writer.state, self.context.trial, on_progress=on_progress
            )
        if recovery.rejected:
            reason = next(iter(recovery.rejected.values()))
            writer.fall_back_to(recovery.slot, reason=reason)
            step = writer.state.lineage[-1].commit.step
            self._journal.tell("fell_back", epoch=writer.epoch, step=step, reason=reason)
        return recovery

    def _source(
        self,
        epoch: Epoch,
        buffer: SequenceBuffer,
        trainers: TrainerGroup,
        ledger: Ledger,
        drops: Drops,
        dealt: DealtPrompts | None,
    ) -> SampleSource:
        spec = self._spec
        if spec.source != "trajectories":
            next_order = ledger.consumed_count if spec.source == "prompts" else None
            return DatasetSource(
                self._row_uids(),
                buffer,
                trainers,
                batch_size=spec.train_batch_size,
                next_order=next_order,
                on_drop=drops,
            )
        size, window = self._manager.rollout.reorder_window, None
        if size is not None:
            uids = self._row_uids() if dealt is None else dealt.drawn.drawn_uids()
            window = ReorderWindow(size, uids, is_settled=ledger.consumed)
        return TrajectorySource(
            buffer,
            trainers,
            epoch.lineage,
            window,
            input_keys=epoch.graph.dataset_keys,
            batch_size=spec.train_batch_size,
            eta=spec.max_head_offpolicyness,
            producers=self.context.workers("rollout_worker"),
            on_drop=drops,
            is_dropped=ledger.dropped,
            dealt=dealt,
        )

    def _held_out_rows(self) -> list[str]:
        held_out = self._trainer.held_out
        return [] if held_out is None else list(Dataset.planned(held_out))

    @property
    def _trainer(self) -> ModelWorkerSpec:
        """The specification of model workers; the fields read here are equal for all."""
        trainer = self.context.plan.worker("model_worker", 0)
        assert isinstance(trainer, ModelWorkerSpec), trainer
        return trainer

    @property
    def _manager(self) -> GserverManagerSpec:
        return self.context.plan.all_of(GserverManagerSpec)[0]

    @property
    def _dataset(self) -> DatasetSpec:
        """In the specification of those who read the rows."""
        return self._trainer.dataset or self._manager.dataset

    @cached_property
    def _prompts(self) -> PlannedPrompts:
        """Read once, since they never change."""
        return PlannedPrompts.load(self._dataset)

    def _ledger_of(self, recovery: RecoveryPoint) -> Ledger:
        rows, commit = numbers_of(self._prompts.row_ids), recovery.commit
        return committed_ledger(self.context.trial, commit, rows) if commit else Ledger(rows)

    def _row_uids(self) -> Iterator[str]:
        seed, num_epochs = self.context.plan.seed, self._spec.control.total_train_epochs
        return self._prompts.uids(seed=seed, num_epochs=num_epochs)

    def _publish(self, published: PublishedWeights) -> None:
        """Say which weights are the present ones."""
        self._say(self.context.keys.policy_version(), published.to_json())

    def _say(self, key: str, text: str) -> None:
        """As a lease, so that the record returns by itself after Redis restarted."""
        if key in self._leases:
            self._leases[key].update(text)
        else:
            self._leases[key] = self.context.lease(key, text)


@contextmanager
def rare_collections() -> Iterator[None]:
    """What is here already is never searched again, and what comes is searched seldom for as long as the block runs."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTION_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
