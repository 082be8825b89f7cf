"""What one trainer epoch works with, all of it made by the master before the epoch begins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log import LogWriter
from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.policy_version import Lineage
from corral.workers.checkpoint.checkpoint import RecoveryPoint
from corral.workers.checkpoint.ledger import Ledger
from corral.workers.checkpoint.published_weights import PublishedWeights
from corral.workers.checkpoint.weights_in_use import Refusal
from corral.workers.lifecycle.presence import Presence
from corral.workers.master.sample_source import SampleSource
from corral.workers.master.sequence_buffer import SequenceBuffer
from corral.workers.master.trainer_gang import TrainerGang


@dataclass(frozen=True, kw_only=True)
class EpochParts:
    """What an epoch works with."""

    spec: MasterWorkerSpec
    graph: DataflowGraph
    trial: TrialDirectory
    attempt: int
    """Which start of the trial this is, from 0."""
    presence: Presence
    journal: Journal
    gang: TrainerGang
    writer: LogWriter
    recovery: RecoveryPoint
    ledger: Ledger
    lineage: Lineage
    buffer: SequenceBuffer
    source: SampleSource
    held_out_rows: Sequence[str]
    """Ids of the rows that calls evaluate on; empty where none does."""
    publish: Callable[[PublishedWeights], None]
    """Make weights known to the generation-server manager."""
    weights_in_use: Callable[[], frozenset[Path] | None]
    """Directories of weights that generation servers are reading; None if nobody knows at the moment."""
    refused_weights: Callable[[], Refusal | None]
    """What a generation server was last found to refuse."""
    step_timeout_s: float
