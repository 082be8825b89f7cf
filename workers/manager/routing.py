"""ServerTable: which generation servers serve, at which weights, and who gets the next request.

             appeared                told the version                 answered, version verified
   (none) ───────────► STARTING ─────────────────► LOADING ───────────────────────────────► READY
                          ▲                          ▲   │ update failed                     │ │
                          │ new incarnation          │   ▼                                   │ │ request or probe failed
                          │                          └─ SUSPECT ◄────────────────────────────┼─┘
                        DEAD ◄── record gone ──────────────────────────────────────────────── (from any state)
                                    newer weights are there: READY ──► LOADING

READY servers get requests, also while newer weights are brought to their host: LOADING begins when all is there. So a
server may be behind the trainer, and then it gets

    a group that has tokens    if its version is not older than the oldest of them
    a group that has none      if a sample of its version can still be trained on when its turn comes

which adds nothing that is older than what the gate lets run: of the first the oldest token stays the oldest; of the
second the version is at least the one at which its batch may be trained, less eta. Versions of another epoch are never
compared: after a failure only weights that were published since serve. Pure: probes, HTTP and name-resolve are in
gserver_manager.py.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from corral.scheduling.policy_version import PolicyVersion

SchedulePolicy = Literal["round_robin", "least_requests", "least_token_usage"]


class ServerState(Enum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"


@dataclass
class Server:
    """One incarnation of a generation server as the manager sees it; news of one that was replaced change nothing."""

    name: str
    url: str
    control: str
    """Where its worker is told to bring it to other weights."""
    incarnation: str
    place: str = ""
    """Where its worker stages versions, if other hosts can have them from there, see `weight_tree.py`."""
    staged: str = ""
    """Tag of the version that other hosts can have from its worker."""
    arrives_from: str | None = None
    """The place that a version comes from now, empty for the shared file system; None where none is on its way."""
    state: ServerState = ServerState.STARTING
    version: PolicyVersion | None = None
    """Of the weights that it was verified to hold."""
    requests: dict[str, int] = field(default_factory=dict)
    """Tokens that may still come, by uid of the group."""

    @property
    def tokens(self) -> int:
        return sum(self.requests.values())

    def loading(self) -> None:
        """It was told to take over other weights."""
        self.state = ServerState.LOADING

    def ready(self, version: PolicyVersion) -> None:
        """It was verified to hold `version`."""
        self.state, self.version, self.arrives_from = ServerState.READY, version, None

    def suspect(self) -> None:
        """An update, probe or request failed; it gets no requests until an update succeeds."""
        self.state, self.arrives_from = ServerState.SUSPECT, None
        self.requests.clear()


@dataclass
class ServerTable:
    """All servers of the trial.

    Example:
        table = ServerTable(policy="least_requests")
        table.appeared("generation_server/0", url="http://10.0.0.1:1", control=..., incarnation="a")
        table.servers["generation_server/0"].ready(PolicyVersion(0, 0))
        table.route("0:problem-1", tokens=256, version=PolicyVersion(0, 0), least_step=0)   # -> that server
    """

    policy: SchedulePolicy
    servers: dict[str, Server] = field(default_factory=dict)
    _turn: int = 0

    def appeared(self, name: str, *, url: str, control: str, incarnation: str, place: str = "") -> None:
        """A record of a server was seen; a new incarnation starts from nothing."""
        known = self.servers.get(name)
        if known is None or known.incarnation != incarnation:
            self.servers[name] = Server(name=name, url=url, control=control, incarnation=incarnation, place=place)

    def gone(self, present: set[str]) -> list[str]:
        """Forget every server whose record is not `present`; returns their names."""
        dead = sorted(set(self.servers) - present)
        for name in dead:
            del self.servers[name]
        return dead

    def needing(self, version: PolicyVersion) -> list[Server]:
        """Servers that have to be brought to `version`."""
        return [
            server
            for server in self.servers.values()
            if server.state in (ServerState.STARTING, ServerState.SUSPECT)
            or (server.state is ServerState.READY and server.version != version)
        ]

    def staged(self, server: Server, *, version: str | None) -> None:
        """Its worker has staged `version`; None if it has no room, and then its whole host has no part in the tree."""
        if self.servers.get(server.name) is not server:
            return
        server.arrives_from = None
        if version is not None:
            server.staged = version
            return
        for other in [other for other in self.servers.values() if other.place == server.place]:
            other.place = other.staged = ""

    def gave_not(self, control: str, *, version: str) -> None:
        """A worker did not give a version that it has staged; nobody is sent to it until it has staged another time."""
        for server in self.servers.values():
            if server.control == control and server.staged == version:
                server.staged = ""

    def ready(self) -> list[Server]:
        """Servers that answer, at whatever version."""
        return [server for server in self.servers.values() if server.state is ServerState.READY]

    def serving(self, version: PolicyVersion, *, least_step: int | None = None) -> list[Server]:
        """Servers that may get requests while the trainer is at `version`: those that hold it, or one of its epoch from
        `least_step` on."""
        least = version.step if least_step is None else min(least_step, version.step)
        return [
            server
            for server in self.ready()
            if server.version is not None
            and server.version.epoch == version.epoch
            and least <= server.version.step <= version.step
        ]

    def route(
        self, uid: str, *, tokens: int, version: PolicyVersion, least_step: int, avoided_url: str = ""
    ) -> Server | None:
        """Choose the server for the next chunk of a group, see `serving`; None while none serves it.

        A group stays where its last chunk was (its prefix is cached there), unless that server failed it or had no
        room for it; then only if there is no other.
        """
        candidates = self.serving(version, least_step=least_step)
        elsewhere = [server for server in candidates if server.url != avoided_url]
        candidates = elsewhere or candidates
        if not candidates:
            return None
        stayed = next((server for server in candidates if uid in server.requests), None)
        self.finished(uid)
        chosen = stayed or self._choose(candidates)
        chosen.requests[uid] = tokens
        return chosen

    def finished(self, uid: str) -> None:
        """A group needs no server any more."""
        for server in self.servers.values():
            server.requests.pop(uid, None)

    def _choose(self, candidates: list[Server]) -> Server:
        if self.policy == "least_requests":
            return min(candidates, key=lambda server: (len(server.requests), server.name))
        if self.policy == "least_token_usage":
            return min(candidates, key=lambda server: (server.tokens, server.name))
        self._turn += 1
        return sorted(candidates, key=lambda server: server.name)[self._turn % len(candidates)]
