"""The samples of one rank: where they come from, where they lie, and what becomes of them.

    rollout workers ──► TrajectoryInbox ──Fetch───┐                ┌──► Models: inputs of calls, their outputs back
                                                  ├──► DataStore ──┤
    rows of the dataset ──► RowLoader ──LoadRows──┘                └──► DataManager: to ranks that compute on them
                                                        ▲
                         Reject, ClearDataCache ────────┘  gone; whoever sent a rejected one is told

A trial has one source of the two. What the master asks here is answered in the stream's I/O thread, also while the main
thread computes; only a new epoch (`forget`, `start_session`) is the main thread's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

from corral.experiments.worker_specs import ModelWorkerSpec
from corral.workers.data.prompts import is_held_out
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.delivery.messages import VerdictKind
from corral.workers.lifecycle.worker import WorkerContext
from corral.workers.model.data_store import DataStore
from corral.workers.model.row_loader import RowLoader
from corral.workers.model.trajectory_inbox import TrajectoryInbox, open_inbox
from corral.workers.requests.messages import SampleMetadata


@dataclass(frozen=True, slots=True)
class Samples:
    """Fills the store from its source and empties it again; the master hears of samples as metadata."""

    store: DataStore
    _: KW_ONLY
    inbox: TrajectoryInbox | None = None
    """What rollout workers send; None where samples are rows."""
    rows: RowLoader | None = None
    """Reads rows of the dataset; None where samples are trajectories."""
    held_out: RowLoader | None = None
    """Reads rows that are looked at and not learned from; None where nobody does."""
    num_rows: int = 0
    """Rows of the dataset, 0 without one."""

    def announce_to(self, on_arrival: Callable[[], None]) -> None:
        """From now on call this, in any thread, whenever rollout workers have sent something."""
        if self.inbox is not None:
            self.inbox.announce_to(on_arrival)

    def fetch(self, max_samples: int) -> list[SampleMetadata]:
        """Store what rollout workers have sent and say what it is."""
        return self.inbox.fetch(max_samples) if self.inbox is not None else []

    def load_rows(self, uids: Sequence[str]) -> list[SampleMetadata]:
        """Store rows of the dataset, or held-out rows, and say what they are.

        Raises:
            ValueError: if there are no such rows.
        """
        return [self._take_in(self._loader(uid).load(uid)) for uid in uids]

    def _loader(self, uid: str) -> RowLoader:
        loader = self.held_out if is_held_out(uid) else self.rows
        if loader is None:
            what = "held-out rows" if is_held_out(uid) else "rows of a dataset: samples come from rollout workers"
            raise ValueError(f"row {uid!r} was asked for, and this rank has no {what}")
        return loader

    def reject(self, uids: Iterable[str], verdict: VerdictKind) -> None:
        """Throw trajectories away and tell who sent them; nobody sent a row."""
        if self.inbox is not None:
            self.inbox.reject(uids, verdict)

    def clear(self, uids: Sequence[str]) -> None:
        """These samples are used up; nobody is told."""
        self.store.drop(uids)
        if self.inbox is not None:
            self.inbox.clear(uids)

    def forget(self) -> None:
        """Free what an earlier epoch left here."""
        self.store.drop(self.store.uids)

    def start_session(self, session: str) -> None:
        """A new epoch begins: the senders deliver again what no commit covers."""
        if self.inbox is not None:
            self.inbox.start_session(session)

    def _take_in(self, sample: SequenceSample) -> SampleMetadata:
        self.store.put(sample)
        return SampleMetadata(uid=sample.uids[0], keys=tuple(sample.seqlens), num_tokens=sample.seqlens["input_ids"][0])


@contextmanager
def open_samples(context: WorkerContext, spec: ModelWorkerSpec, store: DataStore) -> Iterator[Samples]:
    """The samples of this rank, from the source that its plan names, if any come in here."""
    if not spec.takes_samples:
        yield Samples(store)
        return
    held_out = RowLoader(spec.held_out, spec.tokenizer) if spec.held_out is not None else None
    if spec.dataset is not None:
        rows = RowLoader(spec.dataset, spec.tokenizer)
        yield Samples(store, rows=rows, held_out=held_out, num_rows=spec.dataset.num_rows)
        return
    batch_size = context.plan.master.train_batch_size
    with open_inbox(context, store, index=spec.index, batch_size=batch_size) as inbox:
        yield Samples(store, inbox=inbox, held_out=held_out)
