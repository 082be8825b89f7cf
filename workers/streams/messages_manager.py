"""What rollout workers and the generation-server manager say to each other.

    Allocate --> Allocation     may I start this prompt? Its admission number is its birth order.
    Schedule --> Route          which server makes the next chunk?
    Finish   --> Ok             its slot is free again
    Report   --> Ok             what I have, for a manager that has restarted and knows nothing
    Covered  --> Ok             a commit covers these: forget them

Every request names what it is about by uid and can be repeated without harm, because the manager may have restarted in
between.
"""

from typing import Literal

import msgspec


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Admitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A prompt that was admitted, and its admission number."""

    uid: str
    order: int


class Allocate(_Message, frozen=True, tag="allocate"):
    """-> Allocation"""

    worker: str
    uid: str


class Schedule(_Message, frozen=True, tag="schedule"):
    """-> Route"""

    uid: str
    prompt_len: int
    """Tokens that the server has to read: the prompt and what was generated before."""
    max_new_tokens: int
    previous_server: str | None = None
    """Its url; it may still have the prefix in its cache."""
    previous_version: str | None = None


class Finish(_Message, frozen=True, tag="finish"):
    """-> Ok"""

    worker: str
    uid: str
    status: Literal["finished", "dropped", "abandoned"]
    """abandoned: the prompt will be started again, by whomever."""
    tokens: int
    """Generated in all answers."""


class Report(_Message, frozen=True, tag="report"):
    """-> Ok"""

    worker: str
    running: list[Admitted]
    finished: list[Admitted]
    """In the spool, not covered by a commit yet."""


class Covered(_Message, frozen=True, tag="covered"):
    """-> Ok"""

    uids: list[str]


ManagerRequest = Allocate | Schedule | Finish | Report | Covered


class Allocation(_Message, frozen=True, tag="allocation"):
    """The gate's answer."""

    admitted: bool
    order: int = 0
    """Admission number, if admitted."""
    version: str = ""
    """The policy version at admission, "epoch.step"."""
    reason: str = ""
    """Why not, for logs and `rl-status`: "stale", "capacity"."""


class Route(_Message, frozen=True, tag="route"):
    """Where to generate."""

    url: str | None
    """None: no server is ready; ask again."""
    version: str = ""
    """The weights that the server had last, "epoch.step"."""
    reason: str = ""


class Ok(_Message, frozen=True, tag="ok"):
    """Noted."""


ManagerReply = Allocation | Route | Ok
