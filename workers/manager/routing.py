"""ServerTable: the generation servers, their weights, and the choice of the server for each request.

    records ──────► servers by name, see `servers.py` ──READY──► by version, by load ──route──► the least loaded one
    finish, silence, busy ──► its load, its state ──────────────────┘   a group that is known: where it was

READY servers get requests, also while newer weights are brought to their host: LOADING begins when all is there. So a
server may be behind the trainer, and then it gets

    a group that has tokens    if its version is not older than the oldest of them
    a group that has none      if a sample of its version can still be trained on when its turn comes

which adds nothing that is older than what the gate lets run: of the first the oldest token stays the oldest; of the
second the version is at least the one at which its batch may be trained, less eta. Versions of another epoch are never
compared: after a failure only weights that were published since serve. Pure: probes, HTTP and name-resolve are in
fleet.py.

A prompt that a server failed at goes on elsewhere, and the server stays: one request proves nothing against it. Two
prompts within a minute do, unless other servers have failed at them, too, or it has finished a group meanwhile.

A group begins on no server whose KV cache has no room for it: there it would push out what others have computed. That
goes by what answers are expected to come to, and is an optimisation: a server that was filled too far puts answers off.

A choice and an end cost O(log n) of the servers, times the versions that READY servers hold, which are a few: a server
that turns out to be full while one is chosen is passed over until a group ends there.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from corral.experiments.trial.worker_record import Trouble
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.manager.least_loaded import LeastLoaded, Load
from corral.workers.manager.servers import Server, ServerEvent, ServerState

BLAME_LASTS_S: Final = 60.0  # a server that fails at two prompts within so long is SUSPECT
TROUBLE_AFTER_S: Final = 10.0  # what is over before is no news


@dataclass
class ServerTable:
    """All servers of the trial.

    Example:
        table = ServerTable()
        server = table.appeared("generation_server/0", url="http://10.0.0.1:1", control=..., incarnation="a")
        table.happened(server, "updating"), table.happened(server, "verified", version=PolicyVersion(0, 0))
        table.route("0:problem-1", tokens=256, version=PolicyVersion(0, 0), least_step=0)   # -> that server
    """

    clock: Callable[[], float] = time.monotonic
    servers: dict[str, Server] = field(default_factory=dict)
    _ready: dict[PolicyVersion, LeastLoaded] = field(default_factory=dict)
    """READY servers by the version that they hold."""
    _name_by_url: dict[str, str] = field(default_factory=dict)
    _route_by_uid: dict[str, tuple[Server, str]] = field(default_factory=dict)
    """The server of a group, and the rollout worker that has asked."""
    _failures: dict[str, dict[str, float]] = field(default_factory=dict)
    """When a server failed at a prompt last, by uid and name."""

    # What happens to servers

    def appeared(
        self, name: str, *, url: str, control: str, incarnation: str, place: str = "", kv_tokens: int = 0
    ) -> Server:
        """A record of a server was seen; a new incarnation starts from nothing."""
        known = self.servers.get(name)
        if known is not None and known.incarnation == incarnation:
            return known
        if known is not None:
            self._forget(known)
        self._name_by_url[url] = name
        self.servers[name] = Server(
            name=name, url=url, control=control, incarnation=incarnation, place=place, kv_tokens=kv_tokens
        )
        return self.servers[name]

    def gone(self, present: set[str]) -> list[str]:
        """Forget every server whose record is not `present`; returns their names."""
        dead = sorted(self.servers.keys() - present)
        for name in dead:
            self._forget(self.servers.pop(name))
        return dead

    def _forget(self, server: Server) -> None:
        self.happened(server, "gone")
        self._name_by_url.pop(server.url, None)

    def happened(
        self, server: Server, event: ServerEvent, *, version: PolicyVersion | None = None, reason: str = ""
    ) -> None:
        """
        Args:
            version: that it was verified to hold.
            reason: of what is wrong with it now.
        """
        self._take_out(server)
        server.on(event, now=self.clock(), reason=reason)
        server.version = version or server.version
        if server.state in (ServerState.SUSPECT, ServerState.DEAD):
            for uid in list(server.tokens_by_uid):
                self.finished(uid)
        self._put_in(server)

    def staged(self, server: Server, *, version: str | None) -> None:
        """Its worker has staged `version`; None if it has no room, and then its whole host has no part in the tree."""
        if server.state is ServerState.DEAD:
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

    # Who serves

    def needing(self, version: PolicyVersion) -> list[Server]:
        """Servers that have to be brought to `version`, and may be now."""
        now = self.clock()
        return [server for server in self.servers.values() if server.needs(version, now=now)]

    def troubles(self) -> list[Trouble]:
        """Why servers get no requests, or do not take over weights, where that lasts."""
        now = self.clock()
        return [
            Trouble(worker=server.name, text=server.trouble, for_s=now - server.troubled_since)
            for server in self.servers.values()
            if server.trouble and now - server.troubled_since >= TROUBLE_AFTER_S
        ]

    @property
    def has_ready(self) -> bool:
        """Whether a server answers, at whatever version."""
        return bool(self._ready)

    def serving(self, version: PolicyVersion, *, least_step: int | None = None) -> Iterator[str]:
        """Servers that may get requests while the trainer is at `version`: those that hold it, or one of its epoch from
        `least_step` on."""
        return itertools.chain.from_iterable(self._serving(version, least_step))

    def _serving(self, version: PolicyVersion, least_step: int | None) -> Iterator[LeastLoaded]:
        least = version.step if least_step is None else min(least_step, version.step)
        for held, servers in self._ready.items():
            if held.epoch == version.epoch and least <= held.step <= version.step:
                yield servers

    def is_placed(self, uid: str) -> bool:
        """Whether a group has a server."""
        return uid in self._route_by_uid

    def route(
        self,
        uid: str,
        *,
        tokens: int,
        version: PolicyVersion,
        least_step: int,
        worker: str = "",
        failed_url: str = "",
        busy_url: str = "",
        lost_url: str = "",
    ) -> Server | None:
        """Choose the server for the next request of a group, see `serving`; None while none serves it, or has room.

        A group stays where it was (its prefix is cached there), unless that server failed it or had no room for it. It
        goes to none that has failed it lately as long as another one serves it.

        Args:
            tokens: that its answers are expected to come to, with what they go on from.
            worker: the rollout worker that has the group.
            failed_url: the server that has just failed it.
            busy_url: the server that had no room for it.
            lost_url: the server that could not be reached.
        """
        if lost_url in self._name_by_url:
            self.happened(self.servers[self._name_by_url[lost_url]], "silent", reason=f"{worker} cannot reach it")
        if failed_url in self._name_by_url:
            self.finished(uid)
            self._note_failure(self.servers[self._name_by_url[failed_url]], uid)
        if busy_url in self._name_by_url:
            self.finished(uid)
            self._note(self.servers[self._name_by_url[busy_url]], is_full=True)
        chosen, _ = self._route_by_uid.get(uid, (None, ""))
        if chosen is None or not any(chosen.name in servers for servers in self._serving(version, least_step)):
            failed_it = [self.servers[name] for name in self._failures.get(uid, {}) if name in self.servers]
            for server in failed_it:
                self._take_out(server)
            others = list(self._serving(version, least_step))
            chosen = self._least_loaded(others, tokens)
            for server in failed_it:
                self._put_in(server)
            if not others:
                chosen = self._least_loaded(list(self._serving(version, least_step)), tokens)
        if chosen is None:
            return None
        self.finished(uid)
        self._route_by_uid[uid] = chosen, worker
        chosen.tokens_by_uid[uid] = tokens
        self._note(chosen, more_tokens=tokens)
        return chosen

    def _least_loaded(self, pools: list[LeastLoaded], tokens: int) -> Server | None:
        """Choose among servers with room for so many tokens; a server without room comes last from now on."""
        while (least := min((least for servers in pools if (least := servers.least())), default=None)) is not None:
            server = self.servers[least[1]]
            if server.fits(tokens):
                return server
            if server.is_full:
                break
            self._note(server, is_full=True)
        return None

    def _note_failure(self, server: Server, uid: str) -> None:
        """Servers that only this prompt has failed on are well; it is at fault if several have failed at it."""
        now = self.clock()
        recent = {other: times for other, times in self._failures.items() if max(times.values()) > now - BLAME_LASTS_S}
        self._failures = recent | {uid: recent.get(uid, {}) | {server.name: now}}
        for name in self._failures[uid].keys() & self.servers.keys():
            blaming = [other for other, times in self._failures.items() if times.keys() == {name}]
            is_blamed = len(blaming) > 1
            reason = f"it failed at {len(blaming)} prompts at which no other server has failed" if is_blamed else ""
            self.happened(self.servers[name], "blamed" if is_blamed else "excused", reason=reason)

    def ended(self, uid: str, *, is_answered: bool) -> None:
        """Nothing more is asked for a group; is_answered: its server has made it, and so fails not at everything."""
        self._failures.pop(uid, None)
        if is_answered and uid in self._route_by_uid:
            name = self._route_by_uid[uid][0].name
            without = {other: {n: t for n, t in times.items() if n != name} for other, times in self._failures.items()}
            self._failures = {other: times for other, times in without.items() if times}
        self.finished(uid)

    def finished(self, uid: str) -> None:
        """A group needs no server any more."""
        if (route := self._route_by_uid.pop(uid, None)) is not None:
            server = route[0]
            self._note(server, more_tokens=-server.tokens_by_uid.pop(uid), is_full=False)

    def has_only(self, worker: str, uids: Collection[str]) -> None:
        """A rollout worker has these groups, and no others that it had: it was started again, or is gone."""
        for uid in [uid for uid, (_, other) in self._route_by_uid.items() if other == worker and uid not in uids]:
            self.finished(uid)

    def answered(self, server: Server) -> None:
        """It says that it takes requests."""
        self._note(server, is_full=False)

    def _note(self, server: Server, *, more_tokens: int = 0, is_full: bool | None = None) -> None:
        server.tokens += more_tokens
        server.is_full = server.is_full if is_full is None else is_full
        self._put_in(server)

    def _put_in(self, server: Server) -> None:
        if server.state is ServerState.READY and server.version is not None:
            self._ready.setdefault(server.version, LeastLoaded()).put(server.name, self._load(server))

    def _take_out(self, server: Server) -> None:
        servers = self._ready.get(server.version) if server.version is not None else None
        if servers is not None:
            servers.remove(server.name)
            if not servers and server.version is not None:
                del self._ready[server.version]

    def _load(self, server: Server) -> Load:
        return server.is_full, len(server.tokens_by_uid)
