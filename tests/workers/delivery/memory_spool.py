"""A spool in memory that counts how often each record is read, and can be torn."""

from collections import Counter
from collections.abc import Sequence

from corral.workers.delivery import spool
from corral.workers.delivery.messages import TrajectoryHeader, uid_of_delivery
from corral.workers.streams.codec import Buffer, MessageCodec, Tensors


class MemorySpool(spool.MemorySpool):
    """Of one sender of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads: Counter[str] = Counter()
        self.torn: set[str] = set()
        """Uids whose records cannot be read."""

    def fill(self, header: TrajectoryHeader, tensors: Tensors, *, trial_uuid: str) -> None:
        """As an earlier process of the worker left it."""
        codec: MessageCodec[TrajectoryHeader] = MessageCodec(TrajectoryHeader, trial_uuid=trial_uuid)
        self.append(uid_of_delivery(header.uid), codec.encode(header, epoch=0, tensors=tensors))

    def payload(self, uid: str) -> Sequence[Buffer]:
        if uid in self.torn:
            raise OSError("the spool is torn")
        self.num_reads[uid] += 1
        return super().payload(uid)
