"""One incarnation of a generation server, as the manager sees it: events in, its state out.

             updating              verified
    STARTING ──────► LOADING ────────────────► READY ──┐ not updated: it generates on with its old weights
        │              │ ▲ ▲      updating       │ ▲───┘
        │  not updated │ │ └─────────────────────┤
        │              ▼ │ updating, after a     │ silent
        │                │ pause                 │
        └──────────► SUSPECT ◄───────────────────┘              any ──gone──► DEAD
                        └──excused──► READY

    updating     its worker starts to take over the staged weights
    verified     the server reports that it holds them, and that it takes requests
    not updated  staging or taking over failed
    silent       it could not be reached, or did not answer its probe
    blamed       it failed at two prompts lately, at which no other server has failed
    excused      another server failed at one of these, too: then the prompt is at fault
    gone         its record is gone, or names another incarnation

Only READY servers get requests. A request that is refused is no event: it is the request's failure. So is a failure at
one prompt, by whatever error, which moves on to another server: it benches none. Nor is it one that
a server has no room: it then comes after all others. What the table does not name changes nothing: such news is late. A
SUSPECT server is updated again after a pause that grows with each failure in a row, to 30 s: a network that was cut
comes back. Its worker decides whether a process must start again. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal

from corral.scheduling.policy_version import PolicyVersion

ServerEvent = Literal["updating", "verified", "not updated", "silent", "blamed", "excused", "gone"]

PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # after the first failure in a row, the second, ...
MAX_KV_FRACTION: Final = 0.9  # of a KV cache; the rest is for answers that become longer than expected
HEALTHY_AFTER_S: Final = 60.0  # READY for as long, its earlier failures are forgotten


class ServerState(Enum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    DEAD = "dead"


_NEXT: Final[Mapping[tuple[ServerState, ServerEvent], ServerState]] = {
    (ServerState.STARTING, "updating"): ServerState.LOADING,
    (ServerState.READY, "updating"): ServerState.LOADING,
    (ServerState.SUSPECT, "updating"): ServerState.LOADING,
    (ServerState.LOADING, "verified"): ServerState.READY,
    (ServerState.STARTING, "not updated"): ServerState.SUSPECT,
    (ServerState.LOADING, "not updated"): ServerState.SUSPECT,
    (ServerState.SUSPECT, "not updated"): ServerState.SUSPECT,
    (ServerState.READY, "not updated"): ServerState.READY,
    (ServerState.READY, "silent"): ServerState.SUSPECT,
    (ServerState.READY, "blamed"): ServerState.SUSPECT,
    (ServerState.SUSPECT, "excused"): ServerState.READY,
    **{(state, "gone"): ServerState.DEAD for state in ServerState},
}


@dataclass
class Server:
    """What is known of it; changed by `ServerTable` alone, but for where a version comes from."""

    name: str
    url: str
    control: str
    """URL of its worker, which brings it to other weights."""
    incarnation: str
    kv_tokens: int = 0
    """That its KV cache has room for; 0 if it does not say."""
    place: str = ""
    """Where its worker stages versions, if other hosts can have them from there, see `plan_updates`."""
    staged: str = ""
    """Tag of the version that other hosts can have from its worker."""
    arrives_from: str | None = None
    """The place that a version comes from now, empty for the shared file system; None where none is on its way."""
    state: ServerState = ServerState.STARTING
    version: PolicyVersion | None = None
    """Of the weights that it was verified to hold."""
    num_failures: int = 0
    """In a row."""
    trouble: str = ""
    """Why it gets no requests, or was not brought to the present weights; "" if there is no such reason."""
    troubled_since: float = 0.0
    not_before: float = 0.0
    """When the next update may begin."""
    ready_since: float = 0.0
    is_blamed: bool = False
    """Whether it is SUSPECT because of prompts."""
    tokens_by_uid: dict[str, int] = field(default_factory=dict)
    """That are expected to be in its KV cache, by uid of the group."""
    tokens: int = 0
    """The sum of these."""
    is_full: bool = False
    """Whether it had no room for a group or a request, no group has ended there since, and it has answered no probe."""

    def on(self, event: ServerEvent, *, now: float, reason: str = "") -> None:
        """Something happened at `now`, of any clock that runs on, in seconds.

        Args:
            reason: of what is wrong with it now.
        """
        before = self.state
        if (before, event) not in _NEXT or (event == "excused" and not self.is_blamed):
            return
        self.state = _NEXT[before, event]
        self.is_blamed = event == "blamed"
        if reason and not self.trouble:
            self.troubled_since = now
        self.trouble = "" if event in ("verified", "excused") else reason or self.trouble
        if event in ("updating", "excused"):
            return
        self.arrives_from = None
        if event == "verified":
            self.ready_since, self.is_full = now, False
            return
        if before is ServerState.READY and now - self.ready_since >= HEALTHY_AFTER_S:
            self.num_failures = 0
        self.not_before = now + PAUSES_S[min(self.num_failures, len(PAUSES_S) - 1)]
        self.num_failures += 1

    @property
    def kv_share(self) -> float:
        """Fraction of its KV cache that its groups are expected to take."""
        return self.tokens / self.kv_tokens if self.kv_tokens else 0.0

    def fits(self, tokens: int) -> bool:
        """Whether a group of `tokens` tokens fits. An empty server accepts any group, else a large one never runs."""
        return not (self.kv_tokens and self.tokens_by_uid) or self.tokens + tokens <= MAX_KV_FRACTION * self.kv_tokens

    def needs(self, version: PolicyVersion, *, now: float) -> bool:
        """Whether it has to be brought to `version`, and may be."""
        is_behind = self.state in (ServerState.STARTING, ServerState.SUSPECT)
        is_behind |= self.state is ServerState.READY and self.version != version
        return is_behind and now >= self.not_before
