"""The samples of one rank: where they come from, where they lie, and what becomes of them.

    rollout workers ──► TrajectoryReceiver ──Fetch──┐                ┌──► Models: inputs of calls, their outputs back
                                                    ├──► DataStore ──┤
    rows of the dataset ──► RowLoader ──LoadRows────┘                └──► DataPlane: to ranks that compute on them
                                                        ▲
                         Reject, ClearDataCache ────────┘  gone; whoever sent a rejected one is told

A trial has one source of the two; the master hears of samples as metadata. A record that its rollout worker has given
up has no tensors: its uid and the reason are passed on. What the master asks here is answered in the stream's I/O
thread, also while the main thread computes; only a new epoch (`forget`, `start_session`) is the main thread's.

Of rows, prompt and answer are one sequence, and the loss is on the answer only:

    {"prompt": "12+34=", "answer": "46"}  ──►  input_ids = prompt ids, answer ids, end-of-answer;  prompt_mask
    {"prompt": "12+34=", "chosen": "46", "rejected": "45"}  ──►  two such sequences as one group, the chosen one first
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import numpy as np

from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.prompts.tokens import encode_answer, end_of_answer_id
from corral.experiments.worker_specs import DatasetSpec, ModelWorkerSpec
from corral.workers.data.prompts import is_held_out, load_planned_rows, split_uid
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.delivery.messages import VerdictKind, uid_of_delivery
from corral.workers.delivery.receiver import Trajectory, TrajectoryReceiver
from corral.workers.lifecycle.worker import WorkerContext
from corral.workers.model.data_store import DataStore
from corral.workers.requests.messages import SampleMetadata


class RowLoader:
    """Turns a uid into a sample; `model` is the directory with the tokenizer."""

    def __init__(self, spec: DatasetSpec, model: Path) -> None:
        self._rows = load_planned_rows(spec)
        self._prompts = PromptEncoder(model)
        self._end_of_answer = end_of_answer_id(model, self._prompts.tokenizer)
        self._max_prompt_tokens = spec.config.max_prompt_tokens

    def load(self, uid: str) -> SequenceSample:
        """The sample of a uid.

        Raises:
            ValueError: if its prompt is longer than the dataset allows.
        """
        _, row_id = split_uid(uid)
        row = self._rows[row_id]
        prompt = self._prompts.encode(row.prompt)
        if len(prompt) > self._max_prompt_tokens:
            raise ValueError(
                f"row {row_id!r} (line {row.line}) has a prompt of {len(prompt)} tokens, more than "
                f"dataset.max_prompt_tokens {self._max_prompt_tokens}; raise that limit or shorten the row"
            )
        encoded = [
            [*prompt, *encode_answer(self._prompts.tokenizer, text), self._end_of_answer] for text in row.answers
        ]
        sequences = [np.asarray(ids, dtype=np.int32) for ids in encoded]
        masks = [np.arange(len(ids)) < len(prompt) for ids in sequences]
        return SequenceSample.from_group(uid, {"input_ids": sequences, "prompt_mask": masks})


@dataclass(frozen=True, slots=True)
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
    _delivery_by_uid: dict[str, str] = field(default_factory=dict)

    def announce_to(self, on_arrival: Callable[[], None]) -> None:
        """From now on call this, in any thread, whenever rollout workers have sent something."""
        if self.receiver is not None:
            self.receiver.announce_to(on_arrival)

    def fetch(self, max_samples: int) -> list[SampleMetadata]:
        """Store what rollout workers have sent and say what it is."""
        return [] if self.receiver is None else [self._take_in(one) for one in self.receiver.drain(max_samples)]

    def load_rows(self, uids: Sequence[str]) -> list[SampleMetadata]:
        """Store rows of the dataset, or held-out rows, and say what they are.

        Raises:
            ValueError: if there are no such rows.
        """
        loaded = [self._loader(uid).load(uid) for uid in uids]
        for sample in loaded:
            self.store.put(sample)
        return [
            SampleMetadata(uid=sample.uids[0], keys=tuple(sample.seqlens), num_tokens=sample.answer_lengths())
            for sample in loaded
        ]

    def reject(self, uids: Iterable[str], verdict: VerdictKind) -> None:
        """Throw trajectories away and tell who sent them; nobody sent a row."""
        if self.receiver is None:
            return
        for uid in uids:
            if (delivery := self._delivery_by_uid.get(uid)) is not None:
                self.receiver.verdict(delivery, verdict)
            if verdict != "duplicate":  # a second copy: the first one stays
                self._delivery_by_uid.pop(uid, None)
                self.store.drop([uid])

    def clear(self, uids: Sequence[str]) -> None:
        """These samples are used up; nobody is told."""
        self.store.drop(uids)
        gone = {delivery for uid in uids if (delivery := self._delivery_by_uid.pop(uid, None)) is not None}
        if self.receiver is not None:
            self.receiver.forget(gone)

    def forget(self) -> None:
        """Free what an earlier epoch left here."""
        self.store.drop(self.store.uids)

    def start_session(self, session: str) -> None:
        """A new epoch begins: the senders deliver again what no commit covers."""
        self._delivery_by_uid.clear()
        if self.receiver is not None:
            self.receiver.start_session(session)

    def _loader(self, uid: str) -> RowLoader:
        loader = self.held_out if is_held_out(uid) else self.rows
        if loader is None:
            what = "held-out rows" if is_held_out(uid) else "rows of a dataset: samples come from rollout workers"
            raise ValueError(f"row {uid!r} was asked for, and this rank has no {what}")
        return loader

    def _take_in(self, trajectory: Trajectory) -> SampleMetadata:
        header, tensors = trajectory
        uid = uid_of_delivery(header.uid)
        self._delivery_by_uid[uid] = header.uid
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
    held_out = RowLoader(spec.held_out, spec.tokenizer) if spec.held_out is not None else None
    if spec.dataset is not None:
        rows = RowLoader(spec.dataset, spec.tokenizer)
        yield Samples(store, rows=rows, held_out=held_out)
        return
    with (
        TrajectoryReceiver(context.security, address=context.address) as receiver,
        context.lease(context.keys.trajectory_receiver(spec.index), receiver.endpoint),
    ):
        yield Samples(store, receiver=receiver, held_out=held_out)
