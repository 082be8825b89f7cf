"""What rollout workers and the generation-server manager say to each other.

    Allocate --> Allocation     a prompt, as soon as it may start. Its admission number is its birth order.
    Schedule --> Route          which server makes the next chunk?
    Finish   --> Ok             it is in the spool, or to be issued again: its slot is free
    Report   --> Ok             what I have, for a manager that has restarted and knows nothing

Every request names what it is about by uid and can be repeated without harm, because the manager may have restarted in
between.
"""

from typing import Literal

import msgspec

from corral.workers.streams.codec import MessageBody


class Admitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A prompt that was admitted, and its admission number."""

    uid: str
    order: int


WaitingFor = Literal["weights", "reports", "prompts", "staleness", "concurrency"]
"""The trainer's first weights; what other rollout workers have; a prompt, all being dealt; the gate's two limits."""

Outcome = Literal["finished", "dropped", "again"]
"""In the spool with answers; in the spool as given up; nowhere, and to be issued again."""


class Allocate(MessageBody, frozen=True, tag="allocate"):
    """-> Allocation, when a prompt may start, or what that waits for has become something else; or after a while."""

    worker: str
    incarnation: str
    last: int | None
    """Admission number of the prompt that this process was given last."""
    knows: WaitingFor | Literal[""] = ""
    """What it was told that prompts wait for."""


class Schedule(MessageBody, frozen=True, tag="schedule"):
    """-> Route"""

    uid: str
    tokens: int
    """That may come of all its answers."""
    order: int
    """Its admission number, from which follows when it is trained on at the latest."""
    oldest_version: str = ""
    """Of the tokens that it has; empty if it has none."""
    failed_url: str = ""
    """Server that has just failed this prompt; empty if none has."""
    busy_url: str = ""
    """Server that had no room for this prompt; it is well, but another one may have room."""


class Finish(MessageBody, frozen=True, tag="finish"):
    """-> Ok"""

    worker: str
    uid: str
    order: int
    outcome: Outcome


class Report(MessageBody, frozen=True, tag="report"):
    """-> Ok"""

    worker: str
    incarnation: str
    running: list[Admitted]
    finished: list[Admitted]
    """In the spool, not covered by a commit yet."""
    dropped: list[str]
    """In the spool as given up."""


ManagerRequest = Allocate | Schedule | Finish | Report


class Allocation(MessageBody, frozen=True, tag="allocation"):
    """A prompt, or why there is none; then it is asked for again."""

    uid: str = ""
    order: int | None = None
    """Admission number; None: there is no prompt."""
    waiting_for: WaitingFor | Literal[""] = ""
    reason: str = ""
    """Why not, for `rl-status`."""
    waits_for: list[str] = []
    """The workers that open the gate."""
    must_report: bool = False
    """The manager does not know what this process of the worker has: it must report first."""


class Route(MessageBody, frozen=True, tag="route"):
    """Where to generate."""

    url: str | None
    """None: no server is ready; ask again."""
    reason: str = ""
    """Why there is none, for `rl-status`."""
    waits_for: list[str] = []
    """The workers that one could come from."""


class Ok(MessageBody, frozen=True, tag="ok"):
    """Noted."""


ManagerReply = Allocation | Route | Ok
