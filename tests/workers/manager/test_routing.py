"""Who gets the next request: servers whose weights are young enough for it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from corral.experiments.trial.worker_record import Trouble
from corral.scheduling.policy_version import PolicyVersion
from corral.scheduling.staleness import is_trainable
from corral.workers.manager.routing import BLAME_LASTS_S, TROUBLE_AFTER_S, ServerTable
from corral.workers.manager.servers import PAUSES_S, Server, ServerState
from corral.workers.rollout.generation_client import FailureBudget

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def table_of(count: int, version: PolicyVersion = V1, kv_tokens: int = 0) -> ServerTable:
    table = ServerTable()
    for index in range(count):
        name, url = f"generation_server/{index}", f"http://server-{index}"
        bring_to(table, table.appeared(name, url=url, control="", incarnation="a", kv_tokens=kv_tokens), version)
    return table


def bring_to(table: ServerTable, server: Server, version: PolicyVersion) -> None:
    table.happened(server, "updating")
    table.happened(server, "verified", version=version)


def test_a_server_that_is_behind_serves_what_may_still_be_made_by_its_version_until_it_takes_over() -> None:
    table = table_of(1)
    server = table.servers["generation_server/0"]
    assert table.needing(V2) == [server]
    assert table.route("0:new", tokens=8, version=V2, least_step=2) is None
    assert table.route("0:old", tokens=8, version=V2, least_step=1) is server
    table.happened(server, "updating")
    assert table.route("0:old", tokens=8, version=V2, least_step=1) is None
    table.happened(server, "verified", version=V2)
    assert table.route("0:new", tokens=8, version=V2, least_step=2) is server


def test_no_server_at_the_present_version_is_too_old_whatever_is_asked_for() -> None:
    assert table_of(1).route("0:1", tokens=8, version=V1, least_step=7) is not None


def test_versions_of_another_epoch_and_those_that_training_went_back_from_serve_nothing() -> None:
    assert not any(table_of(1, version=PolicyVersion(1, 1)).serving(PolicyVersion(3, 2), least_step=0))
    assert not any(table_of(1, version=PolicyVersion(1, 4)).serving(PolicyVersion(1, 2), least_step=0))


@given(eta=st.integers(0, 3), batch_size=st.integers(1, 4), order=st.integers(0, 60), step=st.integers(0, 20))
def test_what_the_least_step_allows_is_not_too_old_when_its_turn_comes(
    eta: int, batch_size: int, order: int, step: int
) -> None:
    table = table_of(1, version=PolicyVersion(1, step))
    trained_at = order // batch_size
    for present in range(step, step + eta + 2):
        if (
            any(table.serving(PolicyVersion(1, present), least_step=trained_at - eta))
            and present <= trained_at <= present + eta
        ):
            assert is_trainable(step, trained_at, eta)


def test_a_group_stays_with_its_server_and_leaves_one_that_failed_it() -> None:
    table = table_of(2)
    first = table.route("0:1", tokens=8, version=V1, least_step=1)
    assert first is not None
    again = table.route("0:1", tokens=8, version=V1, least_step=1)
    assert again is first
    other = table.route("0:1", tokens=8, version=V1, least_step=1, failed_url=first.url)
    assert other is not None and other is not first
    assert first.state is ServerState.READY and (first.tokens_by_uid, first.tokens) == ({}, 0)


def failing(table: ServerTable, uid: str, server: Server) -> Server | None:
    """The server for a prompt that this one has just failed."""
    return table.route(uid, tokens=8, version=V1, least_step=1, failed_url=server.url)


def test_a_server_is_suspect_once_it_has_failed_two_prompts_and_answered_none_in_between() -> None:
    table = table_of(3)
    first, second, _ = table.servers.values()
    failing(table, "0:a", first)
    failing(table, "0:a", first)
    assert first.state is ServerState.READY, "it was one prompt"
    failing(table, "0:b", first)
    assert first.state is ServerState.SUSPECT
    failing(table, "0:a", second)
    assert first.state is second.state is ServerState.READY, "now it is that prompt which fails everywhere"
    table.ended("0:a", is_answered=False)
    table.ended("0:b", is_answered=True)
    assert table.route("0:c", tokens=8, version=V1, least_step=1) is first
    failing(table, "0:d", first)
    table.route("0:e", tokens=8, version=V1, least_step=1)
    place = next(server for server in table.servers.values() if "0:e" in server.tokens_by_uid)
    failing(table, "0:f", place)
    table.ended("0:e", is_answered=True)
    failing(table, "0:g", place)
    assert place.state is ServerState.READY, "it has answered one in between"


def test_blame_is_forgotten_after_a_while() -> None:
    now = [0.0]
    table = table_of(2)
    table.clock = lambda: now[0]
    first = table.servers["generation_server/0"]
    failing(table, "0:a", first)
    now[0] = BLAME_LASTS_S + 1.0
    failing(table, "0:b", first)
    assert first.state is ServerState.READY


def test_a_server_that_cannot_be_reached_is_suspect_at_once() -> None:
    table = table_of(2)
    first = table.servers["generation_server/0"]
    other = table.route("0:a", tokens=8, version=V1, least_step=1, lost_url=first.url)
    assert first.state is ServerState.SUSPECT and other is table.servers["generation_server/1"]


def test_why_a_server_does_not_serve_is_known_with_the_time_since_its_first_failure_until_it_serves() -> None:
    now, table = [100.0], table_of(1)
    table.clock = lambda: now[0]
    server = table.servers["generation_server/0"]
    table.happened(server, "silent", reason="it does not answer its probe: refused")
    now[0] += TROUBLE_AFTER_S - 1.0
    assert table.troubles() == [], "it may be over at once"
    now[0] += 1.0
    for reason in ("not brought to version 1.2: no room", "not brought to version 1.2: torn"):
        table.happened(server, "updating")
        table.happened(server, "not updated", reason=reason)
    torn = Trouble(worker=server.name, text="not brought to version 1.2: torn", for_s=TROUBLE_AFTER_S)
    assert table.troubles() == [torn]
    bring_to(table, server, V2)
    assert table.troubles() == []


def test_a_server_that_serves_older_weights_since_it_refuses_newer_weights_is_known_too() -> None:
    now, table = [0.0], table_of(1)
    table.clock = lambda: now[0]
    server = table.servers["generation_server/0"]
    table.happened(server, "not updated", reason="not brought to version 1.2: no room")
    now[0] = TROUBLE_AFTER_S
    assert server.state is ServerState.READY and [one.worker for one in table.troubles()] == [server.name]


@settings(deadline=None)
@given(
    num_servers=st.integers(1, 4),
    sick=st.sets(st.integers(0, 3)),
    poisoned=st.sets(st.integers(0, 11)),
    order=st.lists(st.integers(0, 11), max_size=120),
)
def test_prompts_that_no_server_answers_end_and_cost_neither_servers_nor_other_prompts(
    num_servers: int, sick: set[int], poisoned: set[int], order: list[int]
) -> None:
    table, now, num_tokens = table_of(num_servers), [0.0], 0
    table.clock = lambda: now[0]
    sick = sick - {0}
    is_sick = {name: int(name.rpartition("/")[2]) in sick for name in table.servers}
    budgets, since, failed_url = {}, {}, dict[int, str]()
    ended = dict[int, bool]()
    for number in order + list(range(12)) * 60:
        now[0] += 0.5
        for server in table.needing(V1):
            bring_to(table, server, V1)
        if number in ended:
            continue
        uid = f"0:{number}"
        server = table.route(uid, tokens=8, version=V1, least_step=1, failed_url=failed_url.pop(number, ""))
        if len(poisoned) < 2:
            assert all(is_sick[each.name] or each.state is ServerState.READY for each in table.servers.values())
        if server is None:
            continue
        if number not in poisoned and not is_sick[server.name]:
            num_tokens += 1
            table.ended(uid, is_answered=True)
            ended[number] = True
            continue
        failed_url[number] = server.url
        budget = budgets.setdefault(number, FailureBudget(num_servers))
        if budget.is_spent_by(server.url, others_go_on=num_tokens > since.get(number, 0)):
            table.ended(uid, is_answered=False)
            ended[number] = False
        since[number] = num_tokens
    assert ended == {number: number not in poisoned for number in range(12)}
    now[0] += PAUSES_S[-1]
    for server in table.needing(V1):
        bring_to(table, server, V1)
    assert all(server.state is ServerState.READY for server in table.servers.values())


def test_a_busy_server_gets_what_others_have_no_room_for_until_it_answers_a_probe() -> None:
    table = table_of(2)
    first = table.route("0:1", tokens=8, version=V1, least_step=1)
    assert first is not None
    for number in range(1, 4):
        other = table.route(f"0:{number}", tokens=8, version=V1, least_step=1, busy_url=first.url * (number == 1))
        assert other is not None and other is not first
    assert first.state is ServerState.READY, "it is well"
    assert table.route("0:3", tokens=8, version=V1, least_step=1, busy_url=other.url) is first, "both are busy"
    for server in table.servers.values():
        table.answered(server)
    assert table.route("0:4", tokens=8, version=V1, least_step=1) is first


def test_a_restarted_server_starts_from_nothing_and_late_news_of_the_old_one_is_ignored() -> None:
    table = table_of(1)
    old = table.servers["generation_server/0"]
    table.appeared("generation_server/0", url="http://new", control="", incarnation="b")
    bring_to(table, old, V1)
    table.staged(old, version="1.1")
    new = table.servers["generation_server/0"]
    assert new.state is ServerState.STARTING and new.staged == ""
    table.happened(old, "silent")
    assert new.state is ServerState.STARTING and not any(table.serving(V1))
    assert table.route("0:1", tokens=8, version=V1, least_step=1, failed_url=old.url) is None
    assert new.state is ServerState.STARTING


def test_a_server_whose_record_is_gone_is_forgotten() -> None:
    table = table_of(2)
    assert table.gone({"generation_server/1"}) == ["generation_server/0"]
    assert list(table.servers) == ["generation_server/1"]


@given(
    events=st.lists(
        st.tuples(
            st.integers(0, 9),
            st.sampled_from(["route", "finish", "silent", "updating", "verified", "busy", "answered"]),
        ),
        max_size=60,
    ),
)
def test_who_is_chosen_is_the_least_loaded_of_those_that_may_be(events: list[tuple[int, str]]) -> None:
    """Beside a look at every server."""
    table = table_of(4)
    for number, event in events:
        uid, server = f"0:{number}", table.servers[f"generation_server/{number % 4}"]
        if event == "finish":
            table.finished(uid)
        elif event == "answered":
            table.answered(server)
        elif event in ("silent", "updating", "verified"):
            table.happened(server, event, version=V2 if event == "verified" else None)  # type: ignore[arg-type]
        else:
            table.finished(uid)
            least_step = 1 + number % 2
            able = [
                other
                for other in table.servers.values()
                if other.state is ServerState.READY and other.version and other.version.step >= least_step
            ]
            assert sorted(other.name for other in able) == sorted(table.serving(V2, least_step=least_step))
            if event == "busy":
                table.route(uid, tokens=number, version=V2, least_step=9, busy_url=server.url)
                table.finished(uid)
            loads = {other.name: (other.is_full, len(other.tokens_by_uid)) for other in able}
            expected = min(loads, key=lambda name: (loads[name], name), default=None)
            chosen = table.route(uid, tokens=number, version=V2, least_step=least_step)
            assert (chosen and chosen.name) == expected


def test_a_group_that_has_no_room_waits_until_one_ends_and_an_empty_server_takes_any() -> None:
    table = table_of(2, kv_tokens=100)
    assert all(table.route(f"0:{number}", tokens=50, version=V1, least_step=1) for number in range(2))
    assert table.route("0:2", tokens=50, version=V1, least_step=1) is None, "a tenth is kept free"
    assert any(table.serving(V1, least_step=1))
    assert table.route("0:3", tokens=40, version=V1, least_step=1) is not None, "there is room for a smaller one"
    assert table.route("0:0", tokens=70, version=V1, least_step=1) is not None, "who is there goes on"
    table.finished("0:1")
    larger = table.route("0:4", tokens=500, version=V1, least_step=1)
    assert larger is not None and larger.tokens == 500, "it would fit nowhere else either"


def test_what_a_rollout_worker_had_that_is_gone_takes_no_room() -> None:
    table = table_of(1, kv_tokens=100)
    for uid, worker in (("0:a", "rollout_worker/0"), ("0:b", "rollout_worker/0"), ("0:c", "rollout_worker/1")):
        assert table.route(uid, tokens=30, version=V1, least_step=1, worker=worker) is not None
    table.has_only("rollout_worker/0", {"0:b"})
    server = table.servers["generation_server/0"]
    assert server.tokens_by_uid == {"0:b": 30, "0:c": 30} and server.kv_share == 0.6


@given(
    events=st.lists(
        st.tuples(
            st.integers(0, 19), st.integers(1, 60), st.sampled_from(["route", "route", "finish", "silent", "up"])
        ),
        max_size=80,
    ),
)
def test_no_server_is_filled_beyond_its_cache_and_none_waits_for_one_that_has_room(
    events: list[tuple[int, int, str]],
) -> None:
    table = table_of(3, kv_tokens=100)
    for number, tokens, event in events:
        uid, server = f"0:{number}", table.servers[f"generation_server/{number % 3}"]
        if event == "finish":
            table.finished(uid)
        elif event == "silent":
            table.happened(server, "silent")
        elif event == "up":
            bring_to(table, server, V1)
        elif not table.is_placed(uid):
            ready = [other for other in table.servers.values() if other.state is ServerState.READY]
            able = [other for other in ready if not other.tokens_by_uid or other.tokens + tokens <= 90]
            has_room = any(not other.is_full for other in able)
            chosen = table.route(uid, tokens=tokens, version=V1, least_step=1)
            assert chosen is None or chosen in able
            assert chosen is not None or not has_room
        for other in table.servers.values():
            assert other.tokens == sum(other.tokens_by_uid.values())
            assert other.tokens <= 90 or len(other.tokens_by_uid) == 1


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_groups_of_one_size_wait_only_if_every_server_is_full(events: list[tuple[int, int]]) -> None:
    table = table_of(3, kv_tokens=100)
    for number, finished in events:
        if not table.is_placed(f"0:{number}"):
            has_room = any(server.tokens <= 70 for server in table.servers.values())
            assert (table.route(f"0:{number}", tokens=20, version=V1, least_step=1) is not None) is has_room
        table.finished(f"0:{finished}")
