"""From the trajectory stream to the data store: records become samples, the master hears of them as metadata.

TrajectoryReceiver.drain ──► SequenceSample in the DataStore ──► SampleMetadata (uid, lengths, versions, order)
a record that was given up by its rollout worker has no tensors; only its uid and reason are passed on
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.delivery.delivery_id import uid_of_delivery
from corral.workers.delivery.messages import VerdictKind
from corral.workers.delivery.receiver import Trajectory, TrajectoryReceiver
from corral.workers.lifecycle.worker import WorkerContext
from corral.workers.model.data_store import DataStore
from corral.workers.requests.messages import SampleMetadata

_BATCHES = 8  # held or on their way: rollout workers go on while some train steps are late
_CAPACITY_BYTES = 2**30


class TrajectoryInbox:
    """What one data-parallel head receives; called from the request stream's thread."""

    def __init__(self, receiver: TrajectoryReceiver, store: DataStore) -> None:
        self._receiver = receiver
        self._store = store
        self._delivery_by_uid: dict[str, str] = {}

    def announce_to(self, on_arrival: Callable[[], None]) -> None:
        """From now on call this, in a thread of the inbox, whenever there is something new to `fetch`."""
        self._receiver.announce_to(on_arrival)

    def start_session(self, session: str) -> None:
        """Forget everything; the senders deliver again what no commit covers."""
        self._delivery_by_uid.clear()
        self._receiver.start_session(session)

    def fetch(self, max_samples: int) -> list[SampleMetadata]:
        """Store what has arrived and say what it is."""
        return [self._take_in(trajectory) for trajectory in self._receiver.drain(max_samples)]

    def reject(self, uids: Iterable[str], kind: VerdictKind) -> None:
        """Throw samples away and tell who sent them."""
        for uid in uids:
            delivery = self._delivery_by_uid.get(uid)
            if delivery is not None:
                self._receiver.verdict(delivery, kind)
            if kind != "duplicate":  # a second copy: the first one stays
                self._delivery_by_uid.pop(uid, None)
                self._store.drop([uid])

    def clear(self, uids: Iterable[str]) -> None:
        """These samples were trained on."""
        gone = [self._delivery_by_uid.pop(uid, None) for uid in uids]
        self._receiver.forget({delivery for delivery in gone if delivery is not None})

    def _take_in(self, trajectory: Trajectory) -> SampleMetadata:
        header, tensors = trajectory
        uid = uid_of_delivery(header.uid)
        self._delivery_by_uid[uid] = header.uid
        if header.status == "finished" and uid not in self._store:
            seqlens = {key: [lengths] for key, lengths in header.seqlens.items()}
            self._store.put(SequenceSample([uid], seqlens, dict(tensors), self._store.specs))
        return SampleMetadata(
            uid=uid,
            keys=tuple(header.seqlens),
            num_tokens=header.seqlens.get("input_ids", []),
            versions=tuple(sorted({span.version for spans in header.version_spans for span in spans})),
            order=header.order,
            dropped_because=(header.reason or "dropped") if header.status == "dropped" else "",
        )


@contextmanager
def open_inbox(context: WorkerContext, store: DataStore, *, index: int, batch_size: int) -> Iterator[TrajectoryInbox]:
    """An inbox that rollout workers find under `index`, this rank; `batch_size` samples make one train step."""
    with (
        TrajectoryReceiver(
            context.security,
            address=context.address,
            capacity_records=_BATCHES * batch_size,
            capacity_bytes=_CAPACITY_BYTES,
        ) as receiver,
        context.lease(context.keys.trajectory_receiver(index), receiver.endpoint),
    ):
        yield TrajectoryInbox(receiver, store)
