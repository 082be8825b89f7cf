"""What only Redis can do to a name service: restart, refuse, share a server with other trials."""

import os
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import redis

from corral.launcher.trial.redis_server import REDIS_USERNAME, RedisServer
from corral.name_resolve.base import NameServiceError, NameServiceUnavailableError, NameTimeoutError, Put
from corral.name_resolve.redis import RedisNameService, ScriptCall
from tests.name_resolve.conftest import PASSWORD, TRIAL_PREFIX, add_for_a_while, connect, wait_until
from tests.workers.trusted import redis_client, trust


def raw_client(server: RedisServer) -> redis.Redis:
    return redis_client(*server.address, username=REDIS_USERNAME, password=PASSWORD)


def kill(server: RedisServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: server.poll() is not None, "the killed Redis is gone")


def test_a_lease_is_back_within_10_s_after_redis_lost_everything(own_redis_server: RedisServer) -> None:
    with connect(own_redis_server) as owner, connect(own_redis_server) as observer:
        lease = owner.lease("workers/a", "v", ttl_s=60, owner="me")  # a long TTL must not mean a long absence
        observer.add("plain", "x")
        kill(own_redis_server)
        own_redis_server.start()
        assert observer.wait("workers/a", timeout_s=120) == "v"
        assert not lease.lost
        assert list(observer.get_subtree("")) == ["workers/a"], "nothing that nobody refreshes comes back"


def test_what_comes_back_to_a_redis_that_lost_everything_is_a_change_for_who_waited_before(
    own_redis_server: RedisServer,
) -> None:
    with connect(own_redis_server, unavailable_timeout_s=120) as owner, connect(own_redis_server) as waiter:
        owner.lease("workers/a", "v", ttl_s=60, owner="me")
        seen = waiter.changes({"workers": ""}, timeout_s=60)
        told = threading.Event()

        def wait() -> None:
            while not waiter.changes(seen, timeout_s=60):
                pass
            told.set()

        threading.Thread(target=wait, daemon=True).start()
        kill(own_redis_server)
        own_redis_server.start()
        assert told.wait(120)


def test_operations_wait_through_a_restart(own_redis_server: RedisServer) -> None:
    with connect(own_redis_server, unavailable_timeout_s=120) as names:
        names.add("before", "x")
        kill(own_redis_server)
        waiting = threading.Thread(target=names.add, args=("after", "y"))
        waiting.start()
        own_redis_server.start()
        waiting.join(120)
        assert names.get_subtree("") == {"after": "y"}


def test_a_wait_goes_on_through_a_restart(own_redis_server: RedisServer) -> None:
    found: list[str] = []
    with connect(own_redis_server, unavailable_timeout_s=0.2) as waiter, connect(own_redis_server) as adder:
        thread = threading.Thread(target=lambda: found.append(waiter.wait("a", timeout_s=120)))
        kill(own_redis_server)
        thread.start()
        own_redis_server.start()
        adder.add("a", "v")
        thread.join(30)
    assert found == ["v"]


def test_a_lease_update_during_an_outage_is_published_after_it(own_redis_server: RedisServer) -> None:
    with connect(own_redis_server) as owner, connect(own_redis_server) as observer:
        lease = owner.lease("a", "old", ttl_s=60, owner="me")
        kill(own_redis_server)
        lease.update("new")
        own_redis_server.start()
        assert observer.wait("a", timeout_s=120) == "new"


def test_leaving_during_an_outage_is_no_error(own_redis_server: RedisServer) -> None:
    names = connect(own_redis_server)
    lease = names.lease("a", "v", ttl_s=60, owner="me")
    names.lease("b", "v", ttl_s=60, owner="me")
    kill(own_redis_server)
    lease.release()
    names.close()
    own_redis_server.start()
    with connect(own_redis_server) as observer:
        assert observer.get_subtree("") == {}


def test_an_unreachable_redis_is_named_after_a_bounded_time() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        port = unused.getsockname()[1]
        tls = trust().client()
        with RedisNameService(
            "127.0.0.1", port, "secret", TRIAL_PREFIX, "trial", tls=tls, unavailable_timeout_s=0.2
        ) as names:
            for operation in (
                lambda: names.get("a"),
                lambda: names.add("a", "v"),
                lambda: names.lease("a", "v", ttl_s=1, owner="me"),
                lambda: names.get_subtree(""),
            ):
                with pytest.raises(NameServiceUnavailableError, match=f"Redis at 127.0.0.1:{port} is unreachable") as e:
                    operation()
                assert "secret" not in str(e.value)
            with pytest.raises(NameTimeoutError, match="worker/1 did not register 'a' .* unreachable"):
                names.wait("a", timeout_s=0.4, waiting_for="worker/1")


def test_a_hung_redis_is_unavailable_and_not_a_hang(own_redis_server: RedisServer) -> None:
    with connect(own_redis_server, unavailable_timeout_s=0.5) as names:
        names.add("a", "v")
        os.kill(own_redis_server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(NameServiceUnavailableError, match="is unreachable"):
                names.get("a")
        finally:
            os.kill(own_redis_server.pid, signal.SIGCONT)
        assert names.get("a") == "v"


@pytest.mark.parametrize(
    ("username", "password"),
    [("trial", "wrong"), ("trial", None), (None, None), ("stranger", PASSWORD)],
    ids=["wrong password", "no password", "nobody", "another user"],
)
def test_wrong_credentials_are_an_immediate_error_without_the_password(
    redis_server: RedisServer, username: str | None, password: str | None
) -> None:
    where = redis_server.address
    with RedisNameService(*where, password, TRIAL_PREFIX, username, tls=trust().client()) as names:
        with pytest.raises(NameServiceError, match="refuses user") as caught:
            names.get("a")
        assert not isinstance(caught.value, NameServiceUnavailableError)
        assert PASSWORD not in str(caught.value)


def test_a_prefix_of_another_trial_is_refused(redis_server: RedisServer) -> None:
    with connect(redis_server, prefix="corral/another/") as names:
        for operation in (lambda: names.get("a"), lambda: names.add("a", "v"), lambda: names.wait("a", timeout_s=1)):
            with pytest.raises(NameServiceError, match="refuses user 'trial'"):
                operation()


@pytest.mark.parametrize("prefix", ["corral/x", "", "/", "corral/*/", "corral//"])
def test_prefixes_that_could_reach_other_trials_are_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix|name"):
        RedisNameService("127.0.0.1", 1, None, prefix, tls=trust().client())


def test_two_prefixes_in_one_server_do_not_see_each_other(own_redis_server: RedisServer) -> None:
    with (
        connect(own_redis_server, prefix=f"{TRIAL_PREFIX}1/") as first,
        connect(own_redis_server, prefix=f"{TRIAL_PREFIX}10/") as second,
    ):
        first.add("a", "1")
        second.add("a", "10")
        first.delete("a")
        assert second.get_subtree("") == {"a": "10"}


def test_expired_names_leave_the_index(redis_service: RedisNameService, own_redis_server: RedisServer) -> None:
    add_for_a_while(redis_service, "a/gone", ttl_s=0.02)
    redis_service.add("a/stays", "v")
    wait_until(lambda: list(redis_service.get_subtree("a")) == ["a/stays"], "a/gone expires")
    with raw_client(own_redis_server) as client:
        assert client.zrange(TRIAL_PREFIX + "~names", 0, -1) == ["a/stays"]


def test_a_deleted_name_leaves_the_index(redis_service: RedisNameService, own_redis_server: RedisServer) -> None:
    redis_service.add("a", "v")
    redis_service.delete("a")
    with raw_client(own_redis_server) as client:
        assert client.exists(TRIAL_PREFIX + "~names") == 0


def test_a_subtree_larger_than_one_command_is_complete(redis_service: RedisNameService) -> None:
    numbers = [f"n/{number:04d}" for number in range(1203)]
    puts = [Put(name=number, value="v", owner="me", ttl_s=None) for number in numbers]
    assert redis_service._put(puts) == [""] * len(numbers)
    assert list(redis_service.get_subtree("n")) == numbers


def test_a_record_that_is_not_ours_is_an_error_that_names_its_key(
    redis_service: RedisNameService, own_redis_server: RedisServer
) -> None:
    with raw_client(own_redis_server) as client:
        client.set(TRIAL_PREFIX + "a", "not a record")
    with pytest.raises(NameServiceError, match="corral/.*/a in Redis at .* is not a record"):
        redis_service.get("a")
    assert redis_service._put([Put(name="a", value="v", owner="me", ttl_s=None)]) == ["unknown"]
    with raw_client(own_redis_server) as client:
        client.delete(TRIAL_PREFIX + "a")
        client.rpush(TRIAL_PREFIX + "a", "not even a text")
    with pytest.raises(NameServiceError, match="Redis at .* answers: .*WRONGTYPE"):
        redis_service.add("a", "v")


def test_a_deletion_whose_reply_was_lost_is_no_error(
    redis_service: RedisNameService, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_service.add("a", "v")
    lose_first_reply(monkeypatch)
    redis_service.delete("a")
    assert redis_service.get_subtree("") == {}


def test_an_add_whose_reply_was_lost_recognises_its_own_record(
    redis_service: RedisNameService, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_first_reply(monkeypatch)
    redis_service.add("a", "v")
    assert redis_service.get("a") == "v"


def lose_first_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server executes the first batch of scripts, and the connection breaks before its reply is read."""
    calls = iter([redis.ConnectionError("connection lost after execution")])
    evaluate = RedisNameService._evaluate

    def lose(names: RedisNameService, scripts: Sequence[ScriptCall]) -> list[Any]:
        replies = evaluate(names, scripts)
        for error in calls:
            raise error
        return replies

    monkeypatch.setattr(RedisNameService, "_evaluate", lose)
