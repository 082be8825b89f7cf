"""Messages between rollout workers and trajectory receivers (the data-parallel heads).

    sender                              receiver
      |--- SenderHello ------------------->|
      |<-- Session{session} ---------------|   also said again when a new one starts
      |--- TrajectoryHeader + tensors ---->|   a few at a time: a window
      |<-- Ack{uid} -----------------------|   held, now or already; the window moves on
      |<-- Verdict{uid, kind} -------------|   later, or instead: it will not be trained on (again)

A session ends when the receiver restarts or a new trainer epoch starts: what it held is gone. Nothing else bounds what
a receiver holds: the staleness gate bounds what can be made before it is trained on.

A sample whose trajectory came too late is generated again under the same uid. The stream remembers what it has refused,
so each generation travels under a name of its own, its delivery id: the uid and its admission number,
"0:problem-17#412".
"""

from typing import Final, Literal

from corral.scheduling.policy_version import VersionSpan
from corral.workers.streams.codec import MessageBody


def delivery_id(uid: str, order: int) -> str:
    """The name under which this generation of a sample is delivered."""
    return f"{uid}#{order}"


def uid_of_delivery(name: str) -> str:
    """The sample's uid."""
    return name.rpartition("#")[0]


def order_of_delivery(name: str) -> int:
    """The admission number of this generation of it."""
    return int(name.rpartition("#")[2])


VerdictKind = Literal["duplicate", "again", "stale", "not_finite", "consumed", "dropped", "unreadable"]
"""duplicate: another copy is held. again: that one was of no use, this one is to be sent once more. consumed: it was
trained on, dropped: its prompt was, by another's record; a commit has still to make that final. duplicate, consumed and
dropped last as long as the session, the others are final. stale: too old to train on. not_finite: it has no finite
loss. unreadable: said by the sender itself, whose spool could not give the payload."""
UNTIL_A_COMMIT: Final = frozenset[VerdictKind](("duplicate", "consumed", "dropped"))
"""Verdicts after which a record is still kept."""


class SenderHello(MessageBody, frozen=True, tag="sender_hello"):
    """First thing on every connection."""


class TrajectoryHeader(MessageBody, frozen=True, tag="trajectory"):
    """One group: n answers to one prompt. The tokens are in the tensors beside it."""

    uid: str
    dataset_epoch: int
    order: int
    """Admission number, which is the birth order."""
    num_answers: int
    status: Literal["finished", "dropped"]
    reason: str = ""
    """Why it was dropped."""
    seqlens: dict[str, list[int]] = {}
    """key -> length of each answer."""
    version_spans: list[list[VersionSpan]] = []
    """Who made which tokens, one list per answer."""
    scalars: dict[str, float] = {}
    """Statistics of the group: mean reward, seconds, tokens."""


class Session(MessageBody, frozen=True, tag="session"):
    """Answer to SenderHello, and said again when a new session starts."""

    session: str


class _OfRecord(MessageBody, frozen=True):
    """A message about one record, in one session."""

    session: str
    uid: str


class Ack(_OfRecord, frozen=True, tag="ack"):
    """The receiver holds the record."""


class Verdict(_OfRecord, frozen=True, tag="verdict"):
    """The record is not needed, or not any more."""

    kind: VerdictKind


ToReceiver = SenderHello | TrajectoryHeader
ToSender = Session | Ack | Verdict
