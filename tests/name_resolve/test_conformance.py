"""What every backend promises; each test runs on a real Redis and on the double in memory that other tests use."""

import threading
import time

import pytest

from corral.name_resolve.base import NameNotFoundError, NameService, NameServiceError, NameTimeoutError
from tests.name_resolve.conftest import ServiceFactory, add_for_a_while, wait_until


def test_an_added_value_is_seen_through_another_service(make_service: ServiceFactory) -> None:
    make_service().add("workers/model_worker/0", "tcp://10.0.0.1:5555")
    assert make_service().get("workers/model_worker/0") == "tcp://10.0.0.1:5555"


@pytest.mark.parametrize("value", ["", "two\nlines", 'quo"te', "\N{SNOWMAN}", '{"owner": "x"}', "nul\x00byte", "0"])
def test_values_come_back_unchanged(service: NameService, value: str) -> None:
    service.add("a", value)
    assert service.get("a") == value


def test_adding_overwrites_what_was_there(service: NameService) -> None:
    service.add("a", "first")
    service.add("a", "second")
    assert service.get("a") == "second"


def test_missing_names_are_errors_that_name_them(service: NameService) -> None:
    with pytest.raises(NameNotFoundError, match="'workers/x'"):
        service.get("workers/x")
    service.delete("workers/x")  # it is gone already


def test_a_deleted_name_is_gone_and_free(service: NameService) -> None:
    service.add("a/b", "1")
    service.delete("a/b")
    assert service.get_subtree("") == {}
    service.add("a/b", "2")
    assert service.get("a/b") == "2"


def test_values_expire_and_leave_the_subtree_and_the_name_is_free(make_service: ServiceFactory) -> None:
    service = make_service()
    add_for_a_while(service, "a/short", ttl_s=0.05)
    add_for_a_while(service, "a/long", ttl_s=60)
    wait_until(lambda: list(service.get_subtree("a")) == ["a/long"], "a/short expires")
    with pytest.raises(NameNotFoundError):
        service.get("a/short")
    service.delete("a/short")
    make_service().add("a/short", "again")
    assert service.get_subtree("a") == {"a/long": "x", "a/short": "again"}


def test_adding_makes_a_value_permanent(service: NameService) -> None:
    add_for_a_while(service, "a", ttl_s=0.05)
    service.add("a", "2")
    add_for_a_while(service, "b", ttl_s=0.1)
    wait_until(lambda: service.get_subtree("b") == {}, "b, which lives longer than a had left, expires")
    assert service.get("a") == "2"


def test_a_subtree_is_the_name_itself_and_all_below_it_in_order(service: NameService) -> None:
    for name in ["run1/b", "run1", "run10", "run1/a/deep", "run1.5", "run1-x/a", "run", "run1:y"]:
        service.add(name, name.upper())
    assert service.get_subtree("run1") == {"run1": "RUN1", "run1/a/deep": "RUN1/A/DEEP", "run1/b": "RUN1/B"}
    assert list(service.get_subtree("run1")) == ["run1", "run1/a/deep", "run1/b"]
    assert list(service.get_subtree("run1/a")) == ["run1/a/deep"]
    assert service.get_subtree("nothing") == {}
    assert list(service.get_subtree("")) == sorted(
        ["run1/b", "run1", "run10", "run1/a/deep", "run1.5", "run1-x/a", "run", "run1:y"]
    )


BAD_NAMES = ["/a", "a/", "a//b", "a/*", "a/[b]", "a?", "a b", "a\n", "a/..", ".", "a%b", "~names", "\u00e4", "x" * 241]


@pytest.mark.parametrize("name", ["", *BAD_NAMES])
def test_malformed_names_are_refused_everywhere(service: NameService, name: str) -> None:
    for operation in (
        lambda: service.add(name, "v"),
        lambda: service.get(name),
        lambda: service.delete(name),
        lambda: service.wait(name, timeout_s=0),
        lambda: service.lease(name, "v", ttl_s=1, owner="me"),
    ):
        with pytest.raises(ValueError, match="name"):
            operation()


@pytest.mark.parametrize("root", BAD_NAMES)
def test_malformed_roots_are_refused(service: NameService, root: str) -> None:
    service.add("a/b", "stays")
    with pytest.raises(ValueError, match="name"):
        service.get_subtree(root)
    assert list(service.get_subtree("")) == ["a/b"]


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), 0.0001])
def test_a_ttl_that_cannot_be_kept_is_refused(service: NameService, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl_s must be"):
        service.lease("a", "v", ttl_s=ttl_s, owner="me")


def test_wait_returns_what_is_already_there(service: NameService) -> None:
    service.add("a", "v")
    assert service.wait("a", timeout_s=0) == "v"


def test_wait_finds_a_name_that_is_added_later(make_service: ServiceFactory) -> None:
    waiter, adder = make_service(), make_service()
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(waiter.wait("a/b", timeout_s=120)))
    thread.start()
    time.sleep(0.1)
    adder.add("a/b", "later")
    thread.join(20)
    assert found == ["later"]


def test_wait_finds_a_lease_that_is_acquired_later(make_service: ServiceFactory) -> None:
    waiter, owner = make_service(), make_service()
    timer = threading.Timer(0.1, lambda: owner.lease("a", "leased", ttl_s=30, owner="me"))
    timer.start()
    assert waiter.wait("a", timeout_s=120) == "leased"
    timer.join(20)


def test_wait_that_times_out_says_for_whom_and_for_how_long(service: NameService) -> None:
    with pytest.raises(NameTimeoutError, match="rollout_worker/3 did not register 'workers/x' within 0.1 s") as caught:
        service.wait("workers/x", timeout_s=0.1, waiting_for="rollout_worker/3")
    assert isinstance(caught.value, TimeoutError)


def test_a_closed_service_refuses_new_leases(service: NameService) -> None:
    service.close()
    service.close()
    with pytest.raises(NameServiceError, match="closed"):
        service.lease("a", "v", ttl_s=1, owner="me")


def test_all_who_ask_for_the_time_are_told_the_same(make_service: ServiceFactory) -> None:
    first, second = make_service(), make_service()
    before = first.clock()
    assert before <= second.clock() <= first.clock() < before + 60.0


def test_a_change_below_a_root_is_told_to_who_waits_and_to_who_comes_later(make_service: ServiceFactory) -> None:
    service, other = make_service(), make_service()
    service.add("a/b/1", "x")
    seen = service.changes({"a/b": "", "a": ""}, timeout_s=60)
    assert list(seen) == ["a/b"], "only directly below"
    told: list[dict[str, str]] = []
    waiting = threading.Thread(target=lambda: told.append(service.changes(seen, timeout_s=60)))
    waiting.start()
    other.add("a/b/1", "y")
    waiting.join(60)
    assert list(told[0]) == ["a/b"]
    for change in (lambda: other.add("a/b/2", "x"), lambda: other.delete("a/b/1")):
        seen |= service.changes(seen, timeout_s=0.01)
        change()
        assert list(service.changes(seen, timeout_s=0)) == ["a/b"]
    service.add("plain", "x")
    assert list(service.changes({"": ""}, timeout_s=60)) == [""]


def test_a_record_that_is_only_refreshed_is_no_change(make_service: ServiceFactory) -> None:
    service = make_service()
    add_for_a_while(service, "a/b", ttl_s=60)
    seen = service.changes({"a": ""}, timeout_s=60)
    add_for_a_while(service, "a/b", ttl_s=60)
    service.delete("a/nothing")
    assert service.changes(seen, timeout_s=0.01) == {}
