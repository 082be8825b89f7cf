"""A spool in memory that counts how often each record is read, and can be torn."""

from collections import Counter
from collections.abc import Collection, Sequence

from corral.workers.delivery.messages import TrajectoryHeader, uid_of_delivery
from corral.workers.delivery.spool import Spool
from corral.workers.streams.codec import Buffer, MessageCodec, Tensors


class MemorySpool(Spool):
    """Of one sender of a test."""

    def __init__(self) -> None:
        self._payloads: dict[str, list[bytes]] = {}
        self.num_reads: Counter[str] = Counter()
        self.torn: set[str] = set()
        """Uids whose records cannot be read."""

    def fill(self, header: TrajectoryHeader, tensors: Tensors, *, trial_uuid: str) -> None:
        """As an earlier process of the worker left it."""
        codec: MessageCodec[TrajectoryHeader] = MessageCodec(TrajectoryHeader, trial_uuid=trial_uuid)
        self.append(uid_of_delivery(header.uid), codec.encode(header, epoch=0, tensors=tensors))

    def append(self, uid: str, payload: Sequence[Buffer]) -> None:
        assert uid not in self._payloads
        self._payloads[uid] = [bytes(part) for part in payload]

    def discard(self, uids: Collection[str]) -> None:
        for uid in uids:
            self._payloads.pop(uid, None)

    def payload(self, uid: str) -> list[bytes]:
        if uid in self.torn:
            raise OSError("the spool is torn")
        self.num_reads[uid] += 1
        return self._payloads[uid]

    def uids(self) -> list[str]:
        return list(self._payloads)

    def close(self) -> None:
        self._payloads.clear()
