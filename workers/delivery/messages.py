"""What rollout workers and trajectory receivers (the data-parallel heads) say to each other.

    sender                              receiver
      |--- SenderHello ------------------->|
      |<-- Session{session, credit} -------|   which session, and how much room there is
      |--- Offer{uid, size_bytes} -------->|
      |<-- Grant{uid} ---------------------|   a credit: room is reserved for exactly this record
      |--- Record{header} + tensors ------>|
      |<-- Ack{uid} -----------------------|   held; instead of Grant if it was held already
      |<-- Verdict{uid, kind} -------------|   later, or instead: it will not be trained on (again)
      |--- Withdraw{uid} ----------------->|   the offer does not stand any more

Everything names its session. A session ends when the receiver restarts or a new trainer epoch starts: what it held is
gone.

A sample whose trajectory came too late is generated again under the same uid. The stream remembers what it has refused,
so each generation travels under a name of its own, its delivery id: the uid and its admission number,
"0:problem-17#412".
"""

from typing import Annotated, Literal

import msgspec

from corral.scheduling.policy_version import VersionSpan
from corral.workers.streams.codec import MessageBody


def delivery_id(uid: str, order: int) -> str:
    """The name under which this generation of a sample is delivered."""
    return f"{uid}#{order}"


def uid_of_delivery(name: str) -> str:
    """The sample's uid."""
    return name.rpartition("#")[0]


VerdictKind = Literal["duplicate", "stale", "consumed", "malformed", "unreadable"]
"""duplicate: another receiver holds it. consumed: it was trained on, which a commit has still to make final. Both last
as long as the session; the others are final. stale: too old to train on. malformed: the record is not what its offer
said. unreadable: said by the sender itself, whose spool could not give the payload."""


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


class Credit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Room that nobody has reserved yet."""

    records: int
    size_bytes: int


class SenderHello(MessageBody, frozen=True, tag="sender_hello"):
    """First thing on every connection."""

    sender: str
    """ "rollout_worker/0" """


class _OfRecord(MessageBody, frozen=True):
    """What is said of one record, in one session."""

    session: str
    uid: str


class Offer(_OfRecord, frozen=True, tag="offer"):
    """I have this record."""

    size_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Withdraw(_OfRecord, frozen=True, tag="withdraw"):
    """Do not wait for this record."""


class Record(MessageBody, frozen=True, tag="record"):
    """The record itself, after a Grant."""

    session: str
    header: TrajectoryHeader


class Session(MessageBody, frozen=True, tag="session"):
    """Answer to SenderHello, and said again when a new session starts or the credit changes."""

    session: str
    credit: Credit


class Grant(_OfRecord, frozen=True, tag="grant"):
    """Send it."""


class Ack(_OfRecord, frozen=True, tag="ack"):
    """It is held."""


class Verdict(_OfRecord, frozen=True, tag="verdict"):
    """It is not needed (any more)."""

    kind: VerdictKind


ToReceiver = SenderHello | Offer | Withdraw | Record
ToSender = Session | Grant | Ack | Verdict
