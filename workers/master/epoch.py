"""A trainer epoch: the claim that it writes under, the commit that it resumes from, and the plan.

Models that take over each other's weights must be alike in what the ranks have loaded when it begins: what differs
would be seen only later, in the middle of a collective whose sizes differ.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import Journal, read_journal
from corral.experiments.trial.log import LogWriter
from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import DataflowGraph, build_dataflow
from corral.scheduling.policy_version import Lineage
from corral.workers.checkpoint.checkpoint import WEIGHTS, RecoveryPoint, state_folder, weights_folder
from corral.workers.lifecycle.worker import BadConfigurationError, WorkerContext
from corral.workers.master.disk import Disk
from corral.workers.requests.messages import LoadedModel, TrainNotice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """From a claim in the trial log to the end of the run, a stop, or the loss of a model worker."""

    context: WorkerContext
    spec: MasterWorkerSpec
    writer: LogWriter
    recovery: RecoveryPoint
    disk: Disk
    journal: Journal
    alarms: set[str] = field(default_factory=set)
    """Topics whose newest notice of this attempt is an alarm; see `standing_alarms`."""

    @property
    def trial(self) -> TrialDirectory:
        return self.context.trial

    @cached_property
    def graph(self) -> DataflowGraph:
        return build_dataflow(self.spec.calls)

    @cached_property
    def lineage(self) -> Lineage:
        return Lineage(self.writer.state.versions, epoch=self.writer.epoch)

    # What it starts from

    @property
    def first_step(self) -> int:
        """That of the last commit; 0 where nothing is committed."""
        return self.recovery.commit.step if self.recovery.commit else 0

    @property
    def checkpoint(self) -> Path | None:
        commit = self.recovery.commit
        return self.trial.inside(commit.directory) if commit is not None else None

    @property
    def roles(self) -> list[str]:
        """Those that are trained."""
        return list(self.spec.initial_weights)

    def weights_folder(self, role: str) -> str:
        """Of a checkpoint."""
        return WEIGHTS if role == self.spec.published_role else weights_folder(role)

    @property
    def initial_weights(self) -> dict[str, Path]:
        """Where each trained role's weights are."""
        if self.checkpoint is None:
            return dict(self.spec.initial_weights)
        return {role: self.checkpoint / self.weights_folder(role) for role in self.roles}

    @property
    def initial_states(self) -> dict[str, Path]:
        """Where each trained role's training state is; none where nothing was committed yet."""
        return {role: self.checkpoint / state_folder(role) for role in self.roles} if self.checkpoint else {}

    # What it says

    def during(self, phase: str, waits_for: Sequence[str]) -> AbstractContextManager[None]:
        """A phase in which these workers have as long as for a step."""
        deadline_s = self.context.plan.supervision.step_timeout_s
        return self.context.presence.during(phase, waits_for=waits_for, deadline_s=deadline_s)

    async def note(self, event: str, **fields: object) -> None:
        """A line of the journal."""
        await self.disk.run(self.journal.tell, event, epoch=self.writer.epoch, **fields)

    async def tell(self, notice: TrainNotice, *, step: int) -> None:
        """The log says it once, and rl-status as long as no other notice of its topic follows."""
        level = logging.WARNING if notice.is_alarm else logging.INFO
        logger.log(level, "%s", "; ".join([notice.text, notice.details, *notice.causes]))
        await self.note("train_notice", attempt=self.context.attempt, step=step, **msgspec.to_builtins(notice))
        (self.alarms.add if notice.is_alarm else self.alarms.discard)(notice.topic)

    async def end_alarm(self, topic: str, text: str, *, step: int) -> None:
        """Says that the alarm about `topic` is over, if there is one."""
        if topic in self.alarms:
            await self.tell(TrainNotice(topic=topic, is_alarm=False, text=text, details="", causes=[]), step=step)


def standing_alarms(trial: TrialDirectory, attempt: int) -> set[str]:
    """Topics whose newest notice of an attempt is an alarm: an epoch may end those of the epoch before."""
    notices = [event for event in read_journal(trial.journal_path) if event["event"] == "train_notice"]
    newest = {event["topic"]: event["is_alarm"] for event in notices if event.get("attempt") == attempt}
    return {topic for topic, is_alarm in newest.items() if is_alarm}


def check_reallocations(graph: DataflowGraph, models: Mapping[str, LoadedModel]) -> None:
    """See that models which take over each other's weights have the same parameters.

    Raises:
        BadConfigurationError: naming the call, both models and their shapes.
    """
    for call in graph.calls:
        for source, target in graph.reallocations(call):
            given, taken = models[str(source)], models[str(target)]
            if given != taken:
                raise BadConfigurationError(
                    f"call {call.name!r} hands the weights of {source} ({_describe(given)}) to {target} "
                    f"({_describe(taken)}); start both from models of the same shape"
                )


def _describe(model: LoadedModel) -> str:
    return (
        f"{model.architecture or 'a model'} of {model.num_layers} layers, hidden size {model.hidden_size}, "
        f"vocabulary {model.vocab_size}, {model.num_parameters:,} parameters"
    )
