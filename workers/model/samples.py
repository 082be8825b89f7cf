"""The samples of one rank: where they come from, where they lie, and what becomes of them.

    rollout workers ──► TrajectoryReceiver ──Fetch──┐                ┌──► Models: inputs of calls, their outputs back
                                                    ├──► DataStore ──┤
    rows of the dataset ──► RowLoader ──LoadRows────┘                └──► DataPlane: to ranks that compute on them
                                                        ▲
                         Reject, ClearDataCache ────────┘  gone; the sender of a rejected one hears of it

A trial has one source of the two; the master hears of samples as metadata. A record that its rollout worker has given
up has no tensors: its uid and the reason are passed on. What the master asks here is answered in the stream's I/O
thread, also while the main thread computes; rows are read in a thread of their own, since to make tokens of thousands
takes a while; only a new epoch (`forget`, `start_session`) is the main thread's.

Of rows, prompt and answer are one sequence, and the loss is on what is answered only:

    {"prompt": "12+34=", "answer": "46"}  ──►  input_ids = prompt ids, answer ids, end-of-answer;  prompt_mask
    {"messages": [...]}                   ──►  input_ids of the whole;  prompt_mask, but for what the assistant says
    {"prompt": "12+34=", "chosen": "46", "rejected": "45"}  ──►  two such sequences as one group, the chosen one first

A row that is broken or too long, and was not looked at at submission, is dropped as a failed prompt is.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from corral.experiments.datasets.dataset import Dataset
from corral.experiments.inputs.model_directory import context_length
from corral.experiments.prompts.length_limits import LengthLimits
from corral.experiments.worker_specs import DatasetSpec, ModelWorkerSpec
from corral.workers.data.prompts import BAD_ROW, is_held_out, split_uid
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.delivery.messages import VerdictKind, uid_of_delivery
from corral.workers.delivery.receiver import Trajectory, TrajectoryReceiver
from corral.workers.lifecycle.worker import WorkerContext
from corral.workers.model.data_store import DataStore
from corral.workers.requests.messages import SampleMetadata

logger = logging.getLogger(__name__)


class RowLoader:
    """Turns a uid into a sample.

    Args:
        model: directory with the tokenizer.
        max_row_tokens: of all sequences of a row together; None for any number.
    """

    def __init__(self, spec: DatasetSpec, model: Path, *, max_row_tokens: int | None = None) -> None:
        self._rows = Dataset.planned(spec)
        self._limits = LengthLimits(
            model,
            max_prompt_tokens=spec.config.max_prompt_tokens,
            template_arguments=spec.config.chat_template_kwargs,
            max_row_tokens=max_row_tokens,
            max_sequence_tokens=context_length(model),
        )

    def load(self, uid: str) -> SequenceSample:
        """The sample of a uid.

        Raises:
            ValueError: if there is something wrong with the row, or it is longer than it may be.
        """
        row = self._rows[split_uid(uid)[1]]
        if excess := self._limits.find_excess(row.prompt, row.answers, tools=row.tools):
            raise ValueError(f"{row.place}: {excess}; raise that limit or shorten the row")
        learned = [self._limits.prompts.encode_learned(row.prompt, answer, tools=row.tools) for answer in row.answers]
        sequences = [np.asarray(one.ids, dtype=np.int32) for one in learned]
        masks = [np.asarray(one.is_given, dtype=np.bool_) for one in learned]
        return SequenceSample.from_group(uid, {"input_ids": sequences, "prompt_mask": masks})


@dataclass(slots=True)
class Samples:
    """Fills the store from its source and empties it again."""

    store: DataStore
    _: KW_ONLY
    receiver: TrajectoryReceiver | None = None
    """Of what rollout workers send; None where samples are rows."""
    rows: RowLoader | None = None
    """Reads rows of the dataset; None where samples are trajectories."""
    held_out: RowLoader | None = None
    """Reads rows that are looked at and not learned from; None where nobody does."""
    _deliveries_by_uid: dict[str, list[str]] = field(default_factory=dict)
    """That have come here, the one that lies in the store first."""
    _duplicates: set[str] = field(default_factory=set)
    """Deliveries that another copy was preferred to."""
    _reader: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "rows"))
    _reads: dict[tuple[str, ...], Future[list[SampleMetadata]]] = field(default_factory=dict)
    _on_arrival: Callable[[], None] = lambda: None

    def announce_to(self, on_arrival: Callable[[], None]) -> None:
        """From now on call this, in any thread, whenever rollout workers have sent something, or rows were read."""
        self._on_arrival = on_arrival
        if self.receiver is not None:
            self.receiver.announce_to(on_arrival)

    def fetch(self, max_samples: int) -> list[SampleMetadata]:
        """Store what rollout workers have sent and say what it is."""
        return [] if self.receiver is None else [self._take_in(one) for one in self.receiver.drain(max_samples)]

    def load_rows(self, uids: Sequence[str]) -> list[SampleMetadata] | None:
        """Store rows of the dataset, or held-out rows, and say what they are, and which of them are none.

        None until they are read; the callback of `announce_to` is called then, and the caller asks again.

        Raises:
            ValueError: if there are no such rows, or one that is held out is broken.
        """
        key = tuple(uids)
        if key not in self._reads:
            self._reads[key] = self._reader.submit(lambda: [self._load(uid) for uid in key])
            self._reads[key].add_done_callback(lambda _: self._on_arrival())
        return self._reads.pop(key).result() if self._reads[key].done() else None

    def reject(self, uids: Iterable[str], verdict: VerdictKind) -> None:
        """Throw trajectories away and tell who sent them; nobody sent a row.

        Who sent a copy of one that turns out to be of no use is asked for it again.
        """
        if self.receiver is None:
            return
        for uid in uids:
            deliveries = self._deliveries_by_uid.get(uid, [])
            is_about_first = verdict in ("stale", "not_finite")  # else about what came last: the master takes one in
            undecided = [delivery for delivery in deliveries if delivery not in self._duplicates]
            for delivery in undecided[:1] if is_about_first else undecided[-1:]:
                self.receiver.verdict(delivery, verdict)
                if verdict == "duplicate":
                    self._duplicates.add(delivery)
                else:
                    deliveries.remove(delivery)
            if verdict != "duplicate":  # a second copy: the first one stays
                self.store.drop([uid])
            if is_about_first:
                for delivery in self._duplicates.intersection(deliveries):
                    self.receiver.verdict(delivery, "again")
                    self._duplicates.remove(delivery)
                    deliveries.remove(delivery)
            if not deliveries:
                self._deliveries_by_uid.pop(uid, None)

    def clear(self, uids: Sequence[str]) -> None:
        """These samples are used up; their senders get no message."""
        self.store.drop(uids)
        gone = {delivery for uid in uids for delivery in self._deliveries_by_uid.pop(uid, ())}
        self._duplicates.difference_update(gone)
        if self.receiver is not None:
            self.receiver.forget(gone)

    def forget(self) -> None:
        """Free what an earlier epoch left here."""
        for read in self._reads.values():
            read.cancel()
        wait(self._reads.values())
        self._reads.clear()
        self.store.drop(self.store.uids)

    def start_session(self, session: str) -> None:
        """A new epoch begins: the senders deliver again what no commit covers."""
        self._deliveries_by_uid.clear()
        self._duplicates.clear()
        if self.receiver is not None:
            self.receiver.start_session(session)

    def _load(self, uid: str) -> SampleMetadata:
        loader = self._loader(uid)
        try:
            sample = loader.load(uid)
        except ValueError as error:
            if is_held_out(uid):
                raise
            logger.warning("row %s is dropped: %s", uid, error)
            return SampleMetadata(uid=uid, keys=(), num_tokens=[], dropped_because=f"{BAD_ROW}: {error}")
        self.store.put(sample)
        return SampleMetadata(uid=uid, keys=tuple(sample.seqlens), num_tokens=sample.answer_lengths())

    def _loader(self, uid: str) -> RowLoader:
        loader = self.held_out if is_held_out(uid) else self.rows
        if loader is None:
            what = "held-out rows" if is_held_out(uid) else "rows of a dataset: samples come from rollout workers"
            raise ValueError(f"row {uid!r} was asked for, and this rank has no {what}")
        return loader

    def _take_in(self, trajectory: Trajectory) -> SampleMetadata:
        header, tensors = trajectory
        uid = uid_of_delivery(header.uid)
        self._deliveries_by_uid.setdefault(uid, []).append(header.uid)
        if header.status == "finished" and uid not in self.store:
            seqlens = {key: [lengths] for key, lengths in header.seqlens.items()}
            self.store.put(SequenceSample([uid], seqlens, dict(tensors), self.store.specs))
        return SampleMetadata(
            uid=uid,
            keys=tuple(header.seqlens),
            num_tokens=header.seqlens.get("input_ids", []),
            versions=tuple(sorted({span.version for spans in header.version_spans for span in spans})),
            order=header.order,
            dropped_because=(header.reason or "dropped") if header.status == "dropped" else "",
            scalars=header.scalars,
        )


@contextmanager
def open_samples(context: WorkerContext, spec: ModelWorkerSpec, store: DataStore) -> Iterator[Samples]:
    """The samples of this rank, from the source that its plan names, if any come in here."""
    if not spec.takes_samples:
        yield Samples(store)
        return
    limits = [call.micro_batches.max_tokens_per_micro_batch for call in spec.calls]
    longest = min((limit for limit in limits if limit is not None), default=None)
    held_out = None
    if spec.held_out is not None:
        held_out = RowLoader(spec.held_out, spec.tokenizer, max_row_tokens=longest)
    if spec.dataset is not None:
        rows = RowLoader(spec.dataset, spec.tokenizer, max_row_tokens=longest)
        yield Samples(store, rows=rows, held_out=held_out)
        return
    with (
        TrajectoryReceiver(context.security, address=context.address) as receiver,
        context.lease(context.keys.trajectory_receiver(spec.index), receiver.endpoint),
    ):
        yield Samples(store, receiver=receiver, held_out=held_out)
