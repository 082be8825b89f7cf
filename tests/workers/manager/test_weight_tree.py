"""The tree by which a version reaches all hosts, against what may happen to them: nobody is left out or overloaded."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.policy_version import PolicyVersion
from corral.workers.manager.fleet import (
    MAX_READERS,
    MAX_RECEIVERS,
    SHARED_FILE_SYSTEM,
    Start,
    plan_updates,
)
from corral.workers.manager.routing import ServerTable
from corral.workers.manager.servers import PAUSES_S, Server, ServerState

PRESENT = PolicyVersion(0, 7)
VERSION = str(PRESENT)


class Cluster:
    """Servers on hosts, and the updates that are under way."""

    def __init__(self, num_hosts: int, *, servers_per_host: int = 1) -> None:
        self._now = 0.0
        self.table = ServerTable(clock=lambda: self._now)
        self.under_way: list[Start] = []
        self.num_read: Counter[str] = Counter()
        """How often each host read the shared file system."""
        self._num_joined = 0
        for host in range(num_hosts):
            for _ in range(servers_per_host):
                self.join(f"host-{host}")

    def join(self, place: str) -> None:
        name = f"generation_server/{self._num_joined}"
        self._num_joined += 1
        self.table.appeared(name, url=name, control=f"http://{name}", incarnation="a", place=place)

    def start(self) -> list[Start]:
        """What may start, started, all pauses being over; whatever was planned before holds on."""
        self._now += PAUSES_S[-1]
        under_way = {start.server.name for start in self.under_way}
        needing = [server for server in self.table.needing(PRESENT) if server.name not in under_way]
        starts = plan_updates(self.table.servers.values(), needing, version=VERSION)
        for start in starts:
            start.server.arrives_from = start.arrives_from
            self.table.happened(start.server, "updating")
            if start.arrives_from == SHARED_FILE_SYSTEM:
                self.num_read[start.server.place] += 1
        self.under_way += starts
        self.check()
        return starts

    def end(self, start: Start, *, failed_source: bool = False, fails: bool = False) -> None:
        self.under_way.remove(start)
        if failed_source and start.sources:
            self.table.gave_not(start.sources[0], version=VERSION)
        if fails:
            self.table.happened(start.server, "not updated")
        else:
            self.table.staged(start.server, version=VERSION)
            self.table.happened(start.server, "verified", version=PRESENT)

    def die(self, name: str) -> None:
        self.table.gone(set(self.table.servers) - {name})
        self.under_way = [start for start in self.under_way if start.server.name != name]

    def check(self) -> None:
        """What holds always."""
        arriving = [server for server in self.table.servers.values() if server.arrives_from is not None]
        assert len({server.place for server in arriving}) == len(arriving), "a host gets a version once"
        for place, num_receivers in Counter(server.arrives_from for server in arriving).items():
            assert num_receivers <= (MAX_READERS if place == SHARED_FILE_SYSTEM else MAX_RECEIVERS)
        for start in self.under_way:
            assert start.server.control not in start.sources

    def is_done(self) -> bool:
        return all(server.state is ServerState.READY for server in self.table.servers.values())

    def finish(self) -> int:
        """Rounds until everybody has it, each update taking as long as any other."""
        num_rounds = 0
        while not self.is_done():
            self.start()
            assert self.under_way, "somebody waits, and for nobody"
            for start in list(self.under_way):
                self.end(start)
            num_rounds += 1
        return num_rounds


@given(num_hosts=st.integers(1, 200), servers_per_host=st.integers(1, 3))
def test_every_server_gets_a_version_in_rounds_that_grow_with_the_logarithm_of_the_hosts(
    num_hosts: int, servers_per_host: int
) -> None:
    cluster = Cluster(num_hosts, servers_per_host=servers_per_host)
    first = min(num_hosts, MAX_READERS)
    # Each holder and what it gives to are MAX_RECEIVERS + 1 holders; the others of the last hosts take one round more.
    expected = 1 + math.ceil(math.log(num_hosts / first, MAX_RECEIVERS + 1) - 1e-9) + (servers_per_host > 1)
    assert cluster.finish() <= expected
    assert sum(cluster.num_read.values()) == first
    assert {server.version for server in cluster.table.servers.values()} == {PRESENT}


@given(num_hosts=st.integers(1, 30), data=st.data())
def test_whoever_joins_dies_fails_or_does_not_give_everybody_else_gets_it(num_hosts: int, data: st.DataObject) -> None:
    cluster = Cluster(num_hosts)
    for number in range(data.draw(st.integers(0, 40), "events")):
        cluster.start()
        what = data.draw(st.sampled_from(["end", "no source", "fail", "die", "join", "join host"]))
        if what == "join" or what == "join host":
            cluster.join("host-0" if what == "join host" else f"late-host-{number}")
        elif what == "die":
            if len(cluster.table.servers) > 1:
                cluster.die(data.draw(st.sampled_from(sorted(cluster.table.servers))))
        elif cluster.under_way:
            start = data.draw(st.sampled_from(cluster.under_way))
            cluster.end(start, failed_source=what == "no source", fails=what == "fail")
        cluster.check()
    cluster.finish()
    assert cluster.start() == []


def test_who_joins_late_has_it_from_a_host_that_holds_it() -> None:
    cluster = Cluster(3)
    cluster.finish()
    cluster.join("late")
    [start] = cluster.start()
    assert start.arrives_from in ("host-0", "host-1", "host-2") and len(start.sources) == 3


def test_nobody_is_sent_to_a_source_that_did_not_give_until_it_has_staged_again() -> None:
    cluster = Cluster(2)
    for start in cluster.start():
        cluster.end(start)
    for server in ("generation_server/0", "generation_server/1"):
        cluster.table.gave_not(f"http://{server}", version="0.6")  # of a version that it has given up since
    cluster.table.gave_not("http://generation_server/0", version=VERSION)
    cluster.join("third")
    [start] = cluster.start()
    assert start.sources == ("http://generation_server/1",)
    cluster.end(start, failed_source=True)
    cluster.join("fourth")
    [start] = cluster.start()
    assert start.sources == ("http://generation_server/2",)  # what it had in spite of its source, it gives


def test_a_host_without_room_is_left_out_and_holds_up_nobody() -> None:
    cluster = Cluster(4, servers_per_host=2)
    first, *_ = cluster.start()
    cluster.under_way.remove(first)
    cluster.table.staged(first.server, version=None)
    starts = {start.server.name: start for start in cluster.start()}
    beside = next(
        server.name
        for server in cluster.table.servers.values()
        if not server.place and server.name != first.server.name
    )
    assert starts[beside].arrives_from is None and starts[beside].sources == ()
    cluster.table.happened(first.server, "verified", version=PRESENT)
    cluster.finish()


def test_servers_that_are_no_part_of_a_tree_start_all_at_the_same_time() -> None:
    servers = [
        Server(name=f"generation_server/{index}", url="", control=f"http://{index}", incarnation="a")
        for index in range(9)
    ]
    assert plan_updates(servers, servers, version=VERSION) == [Start(server, None) for server in servers]
