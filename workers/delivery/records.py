"""RecordStore: finished trajectories between the spool on disk and the stream that delivers them.

    finished ──spool (fsync)──► offered ──delivered──► ... ──a commit covers it──► discarded
                    ▲                       │ rejected as stale, malformed, unreadable
              read back at a restart        └──► discarded; its prompt is issued again

A record is its stream header and tensors, in the stream's own encoding. Only the spool is used from other threads; what
it raises (a full or broken disk) ends the worker: what is on disk then decides what the next one generates again.
"""

import asyncio
from collections.abc import Iterable

from corral.workers.delivery.delivery_id import uid_of_delivery
from corral.workers.delivery.messages import TrajectoryHeader
from corral.workers.delivery.sender import TrajectorySender
from corral.workers.delivery.spool import Spool
from corral.workers.streams.codec import MessageCodec, Tensors, tensors_size_bytes


class RecordStore:
    """All records of one rollout worker that no commit covers. All methods belong to the loop's thread."""

    def __init__(self, spool: Spool, sender: TrajectorySender, *, trial_uuid: str) -> None:
        self._spool = spool
        self._sender = sender
        self._codec: MessageCodec[TrajectoryHeader] = MessageCodec(TrajectoryHeader, trial_uuid=trial_uuid)
        self._header_by_uid: dict[str, TrajectoryHeader] = {}
        self._removing = asyncio.Lock()
        for uid in spool.uids():
            self._header_by_uid[uid] = self._codec.decode(spool.payload(uid)).body

    def __contains__(self, uid: str) -> bool:
        return uid in self._header_by_uid

    def uids(self) -> list[str]:
        return list(self._header_by_uid)

    def holds(self, delivery: str) -> bool:
        """Whether the record of this delivery is here, and not another one of its uid."""
        header = self._header_by_uid.get(uid_of_delivery(delivery))
        return header is not None and header.uid == delivery

    def orders(self) -> dict[str, int]:
        """Admission number by uid, of the records that hold answers."""
        return {uid: header.order for uid, header in self._header_by_uid.items() if header.status == "finished"}

    async def put(self, header: TrajectoryHeader, tensors: Tensors) -> None:
        """Make a record durable and offer it to the trainer; OSError if it cannot be written."""
        frames = self._codec.encode(header, epoch=0, tensors=tensors)
        uid = uid_of_delivery(header.uid)
        await asyncio.to_thread(self._spool.append, uid, [bytes(frame) for frame in frames])
        self._header_by_uid[uid] = header
        self._offer(uid, size_bytes=tensors_size_bytes(tensors))

    def offer_all(self) -> None:
        """Offer everything that is here to the trainer; what was offered before is not offered twice."""
        for uid in self._header_by_uid:
            self._offer(uid, size_bytes=tensors_size_bytes(self._tensors(uid)))

    async def remove(self, uids: Iterable[str]) -> list[str]:
        """Forget records on disk, here and in the stream; returns the uids that were here."""
        async with self._removing:  # or a record could go twice, and with it the next one of its uid
            here = [uid for uid in dict.fromkeys(uids) if uid in self._header_by_uid]
            if here:
                await asyncio.to_thread(self._spool.discard, here)
            self._sender.covered([self._header_by_uid.pop(uid).uid for uid in here])
            return here

    def _offer(self, uid: str, *, size_bytes: int) -> None:
        self._sender.offer(self._header_by_uid[uid], lambda: self._tensors(uid), size_bytes=size_bytes)

    def _tensors(self, uid: str) -> Tensors:
        return self._codec.decode(self._spool.payload(uid)).tensors
