"""A generation server's states: who gets requests, and when it is told to take over weights again."""

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.policy_version import PolicyVersion
from corral.workers.manager.servers import HEALTHY_AFTER_S, PAUSES_S, Server, ServerEvent, ServerState

V1 = PolicyVersion(1, 1)
EVENTS = st.sampled_from(get_args(ServerEvent))


def fresh() -> Server:
    return Server(name="generation_server/0", url="http://a", control="", incarnation="a")


@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 100.0))))
def test_nothing_is_ready_that_was_not_told_and_verified_since_it_was_last_silent(
    events: list[tuple[ServerEvent, float]],
) -> None:
    server, now = fresh(), 0.0
    has_been_told = is_verified = is_blamed = False
    for event, passed_s in events:
        now += passed_s
        before = server.state
        server.on(event, now=now)
        match event:
            case "updating":
                has_been_told, is_verified = True, False
            case "verified":
                is_verified |= has_been_told
                has_been_told = False
            case "silent":
                is_verified = False
            case "blamed" if is_verified:
                is_verified, is_blamed = False, True
            case "excused":
                is_verified |= is_blamed
            case "not updated":
                has_been_told = False
        if server.state is ServerState.READY:
            assert is_verified
        if before is ServerState.DEAD or event == "gone":
            assert server.state is ServerState.DEAD


@given(st.lists(st.sampled_from(["silent", "not updated"]), max_size=20))
def test_who_fails_again_and_again_in_a_row_is_told_after_longer_pauses_and_never_given_up(failures: list[str]) -> None:
    server, now = fresh(), 0.0
    for number, failure in enumerate(failures):
        assert server.needs(V1, now=now)
        server.on("updating", now=now)
        if failure == "silent":
            server.on("verified", now=now)
        server.on(failure, now=now)  # type: ignore[arg-type]
        pause_s = PAUSES_S[min(number, len(PAUSES_S) - 1)]
        assert not server.needs(V1, now=now + 0.9 * pause_s)
        now += pause_s
    assert server.needs(V1, now=now)


def test_what_a_server_failed_in_before_it_was_well_for_long_is_forgotten() -> None:
    server = fresh()
    for now in (0.0, 10.0, 20.0 + HEALTHY_AFTER_S):
        server.on("updating", now=now)
        server.version = V1
        server.on("verified", now=now)
        server.on("silent", now=now + 5.0)
    assert server.not_before == 25.0 + HEALTHY_AFTER_S + PAUSES_S[2], "it was not READY for long in between"
    server.on("updating", now=200.0)
    server.on("verified", now=200.0)
    server.on("silent", now=200.0 + HEALTHY_AFTER_S)
    assert server.not_before == 200.0 + HEALTHY_AFTER_S + PAUSES_S[0]


def test_a_server_that_could_not_stage_generates_on_and_is_told_again_later() -> None:
    server = fresh()
    server.on("updating", now=0.0)
    server.version = V1
    server.on("verified", now=0.0)
    server.on("not updated", now=1.0)
    assert server.state is ServerState.READY
    later = PolicyVersion(1, 2)
    assert not server.needs(V1, now=9.0) and not server.needs(later, now=1.1) and server.needs(later, now=9.0)
