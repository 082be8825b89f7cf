"""ServerTable: which generation servers serve, at which weights, and who gets the next request.

             appeared                told the version                 answered, version verified
   (none) ───────────► STARTING ─────────────────► LOADING ───────────────────────────────► READY
                          ▲                          ▲   │ update failed                     │ │
                          │ new incarnation          │   ▼                                   │ │ request or probe failed
                          │                          └─ SUSPECT ◄────────────────────────────┼─┘
                        DEAD ◄── record gone ──────────────────────────────────────────────── (from any state)
                                                     newer weights: READY ──► LOADING

Only READY servers at the present version get requests. Pure: probes, HTTP and name-resolve are in gserver_manager.py.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

SchedulePolicy = Literal["round_robin", "least_requests", "least_token_usage"]


class ServerState(Enum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"


@dataclass
class Server:
    """One generation server as the manager sees it."""

    name: str
    url: str
    control: str
    """Where its worker is told to bring it to other weights."""
    incarnation: str
    state: ServerState = ServerState.STARTING
    version: str = ""
    """Tag of the weights that it was verified to hold."""
    requests: dict[str, int] = field(default_factory=dict)
    """Tokens that may still come, by uid of the group."""

    @property
    def tokens(self) -> int:
        return sum(self.requests.values())


@dataclass
class ServerTable:
    """All servers of the trial.

    Example:
        table = ServerTable(policy="least_requests")
        table.appeared("generation_server/0", url="http://10.0.0.1:1", control=..., incarnation="a")
        table.loading("generation_server/0"); table.ready("generation_server/0", version="0.0")
        table.route("0:problem-1", tokens=256, version="0.0", avoided_url="")   # -> that server
    """

    policy: SchedulePolicy
    servers: dict[str, Server] = field(default_factory=dict)
    _turn: int = 0

    def appeared(self, name: str, *, url: str, control: str, incarnation: str) -> None:
        """A record of a server was seen; a new incarnation starts from nothing."""
        known = self.servers.get(name)
        if known is None or known.incarnation != incarnation:
            self.servers[name] = Server(name=name, url=url, control=control, incarnation=incarnation)

    def gone(self, present: set[str]) -> list[str]:
        """Forget every server whose record is not `present`; returns their names."""
        dead = sorted(set(self.servers) - present)
        for name in dead:
            del self.servers[name]
        return dead

    def needing(self, version: str) -> list[Server]:
        """Servers that have to be brought to `version`."""
        return [
            server
            for server in self.servers.values()
            if server.state in (ServerState.STARTING, ServerState.SUSPECT)
            or (server.state is ServerState.READY and server.version != version)
        ]

    def loading(self, name: str) -> None:
        """A weight update was sent."""
        self.servers[name].state = ServerState.LOADING

    def ready(self, name: str, *, incarnation: str, version: str) -> None:
        """The server was verified to hold `version`; ignored if it has been replaced meanwhile."""
        server = self.servers.get(name)
        if server is not None and server.incarnation == incarnation:
            server.state, server.version = ServerState.READY, version

    def suspect(self, name: str, *, incarnation: str) -> None:
        """An update, probe or request failed; it gets no requests until an update succeeds."""
        server = self.servers.get(name)
        if server is not None and server.incarnation == incarnation:
            server.state = ServerState.SUSPECT
            server.requests.clear()

    def serving(self, version: str) -> list[Server]:
        """Servers that may get requests at `version`."""
        return [
            server
            for server in self.servers.values()
            if server.state is ServerState.READY and server.version == version
        ]

    def route(self, uid: str, *, tokens: int, version: str, avoided_url: str) -> Server | None:
        """Choose the server for the next chunk of a group; None while none serves.

        A group stays where its last chunk was (its prefix is cached there), unless that server failed it or had no
        room for it; then only if there is no other.
        """
        candidates = self.serving(version)
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
