"""RecordStore: finished trajectories between the spool on disk and the stream that delivers them.

    finished ──spool (fsync)──► offered ──delivered──► ... ──a commit covers it──► discarded
                    ▲                       │ rejected as stale, malformed, unreadable
              read back at a restart        └──► discarded; its prompt is issued again

A record is its stream header and tensors, in the stream's own encoding.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy.typing as npt

from corral.workers.data.delivery import uid_of_delivery
from corral.workers.rollout.spool import Spool
from corral.workers.streams.codec import MessageCodec, tensors_size_bytes
from corral.workers.streams.messages_trajectory import TrajectoryHeader
from corral.workers.streams.trajectory_sender import TrajectorySender

Tensors = Mapping[str, npt.NDArray[Any]]


class RecordStore:
    """All records of one rollout worker that no commit covers."""

    def __init__(self, spool: Spool, *, trial_uuid: str) -> None:
        self._spool = spool
        self._codec: MessageCodec[TrajectoryHeader] = MessageCodec(TrajectoryHeader, trial_uuid=trial_uuid)
        self._header_by_uid: dict[str, TrajectoryHeader] = {}
        for uid in spool.uids():
            self._header_by_uid[uid] = self._codec.decode(spool.payload(uid)).body

    def __contains__(self, uid: str) -> bool:
        return uid in self._header_by_uid

    def __len__(self) -> int:
        return len(self._header_by_uid)

    def orders(self) -> dict[str, int]:
        """Admission number by uid."""
        return {uid: header.order for uid, header in self._header_by_uid.items() if header.status == "finished"}

    def put(self, header: TrajectoryHeader, tensors: Tensors) -> None:
        """Make a record durable; returns when it is on disk."""
        frames = self._codec.encode(header, epoch=0, tensors=tensors)
        uid = uid_of_delivery(header.uid)
        self._spool.append(uid, [bytes(frame) for frame in frames])
        self._header_by_uid[uid] = header

    def offer_all(self, sender: TrajectorySender) -> None:
        """Offer everything that is here; what was offered before is not offered twice."""
        for uid in list(self._header_by_uid):
            self.offer(uid, sender)

    def offer(self, uid: str, sender: TrajectorySender) -> None:
        """Offer one record to the trainer."""
        header = self._header_by_uid[uid]
        size_bytes = tensors_size_bytes(self._tensors(uid))
        sender.offer(header, lambda: self._tensors(uid), size_bytes=size_bytes)

    def remove(self, uids: Iterable[str], sender: TrajectorySender) -> list[str]:
        """Forget records on disk, here and in the stream; returns the uids that were here."""
        here = [uid for uid in uids if uid in self._header_by_uid]
        self._spool.discard(here)
        sender.covered([self._header_by_uid.pop(uid).uid for uid in here])
        return here

    def _tensors(self, uid: str) -> dict[str, npt.NDArray[Any]]:
        return self._codec.decode(self._spool.payload(uid)).tensors
