"""Leases on every backend: they live with their owner, and yield to nobody and overwrite nobody."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from corral.name_resolve.base import NameExistsError, NameNotFoundError, NameService, NameServiceError
from tests.name_resolve.conftest import ServiceFactory, add_for_a_while, wait_until
from tests.name_services import running_names

SHORT_TTL_S = 0.3  # refreshed each 0.1 s


def test_leases_outlive_their_ttl_while_they_are_refreshed(make_service: ServiceFactory) -> None:
    owner, observer = make_service(), make_service()
    names = [f"workers/{index}" for index in range(20)]
    leases = [owner.lease(name, "v", ttl_s=0.8, owner="me") for name in names]
    add_for_a_while(observer, "reference", ttl_s=1.2)
    wait_until(lambda: observer.get_subtree("reference") == {}, "a record that lives longer expires")
    assert list(observer.get_subtree("workers")) == sorted(names)
    assert not any(lease.lost for lease in leases)


def test_the_owner_is_not_part_of_the_value(make_service: ServiceFactory) -> None:
    make_service().lease("a", "v", ttl_s=30, owner="me")
    assert make_service().get_subtree("") == {"a": "v"}


def test_an_update_is_visible_at_once_and_survives_refreshes(make_service: ServiceFactory) -> None:
    owner, observer = make_service(), make_service()
    lease = owner.lease("a", "one", ttl_s=SHORT_TTL_S, owner="me")
    lease.update("two")
    assert observer.get("a") == "two"
    add_for_a_while(observer, "reference", ttl_s=2 * SHORT_TTL_S)
    wait_until(lambda: observer.get_subtree("reference") == {}, "a record that lives longer expires")
    assert observer.get("a") == "two"


def test_updates_racing_with_refreshes_never_fall_back(make_service: ServiceFactory) -> None:
    owner, observer = make_service(), make_service()
    lease = owner.lease("a", "0", ttl_s=0.01, owner="me")
    for number in range(1, 200):
        lease.update(str(number))
        assert observer.wait("a", timeout_s=120) == str(number)


def test_a_release_deletes_the_name_and_nothing_brings_it_back(make_service: ServiceFactory) -> None:
    owner, observer = make_service(), make_service()
    lease = owner.lease("a", "v", ttl_s=SHORT_TTL_S, owner="me")
    lease.release()
    lease.release()
    with pytest.raises(NameNotFoundError):
        observer.get("a")
    with pytest.raises(NameServiceError, match="released"):
        lease.update("w")
    time.sleep(SHORT_TTL_S)
    assert observer.get_subtree("") == {}


def test_a_released_name_can_be_leased_again(make_service: ServiceFactory) -> None:
    service = make_service()
    for value in ("one", "two"):
        with service.lease("a", value, ttl_s=30, owner="me"):
            assert service.get("a") == value
    assert service.get_subtree("") == {}


def test_closing_the_service_releases_its_leases(make_service: ServiceFactory) -> None:
    owner, observer = make_service(), make_service()
    owner.lease("a", "v", ttl_s=60, owner="me")
    owner.lease("b", "v", ttl_s=60, owner="me")
    owner.close()
    assert observer.get_subtree("") == {}


def test_the_same_owner_may_register_again_from_elsewhere(make_service: ServiceFactory) -> None:
    make_service().lease("a", "v", ttl_s=60, owner="me")
    second = make_service()
    second.lease("a", "w", ttl_s=60, owner="me")
    assert second.get("a") == "w"


def test_one_service_leases_a_name_once(make_service: ServiceFactory) -> None:
    service = make_service()
    service.lease("a", "v", ttl_s=60, owner="me")
    with pytest.raises(NameExistsError, match="already leased"):
        service.lease("a", "w", ttl_s=60, owner="me")


def test_a_taken_over_lease_is_lost_for_good_and_overwrites_nobody(make_service: ServiceFactory) -> None:
    owner, usurper = make_service(), make_service()
    lease = owner.lease("a", "mine", ttl_s=SHORT_TTL_S, owner="me")
    usurper.add("a", "theirs")
    wait_until(lambda: lease.lost, "the old owner notices")
    assert usurper.get("a") == "theirs"
    with pytest.raises(NameExistsError, match="has taken it"):
        lease.update("mine again")
    lease.release()
    assert usurper.get("a") == "theirs"
    usurper.delete("a")
    time.sleep(SHORT_TTL_S)
    assert usurper.get_subtree("") == {}, "a lost lease must not come back when the name is free again"


def test_an_update_never_overwrites_another_owner(make_service: ServiceFactory) -> None:
    owner, usurper = make_service(), make_service()
    lease = owner.lease("a", "mine", ttl_s=60, owner="me")
    usurper.add("a", "theirs")
    with pytest.raises(NameExistsError):
        lease.update("mine again")
    assert lease.lost
    assert usurper.get("a") == "theirs"


def test_a_release_never_deletes_another_owners_record(make_service: ServiceFactory) -> None:
    owner, usurper = make_service(), make_service()
    lease = owner.lease("a", "mine", ttl_s=60, owner="me")
    usurper.add("a", "theirs")
    lease.release()
    assert usurper.get("a") == "theirs"


def test_a_living_owner_registers_again_after_a_deletion(make_service: ServiceFactory) -> None:
    owner, other = make_service(), make_service()
    lease = owner.lease("a", "v", ttl_s=SHORT_TTL_S, owner="me")
    lease.update("w")
    other.delete("a")
    assert other.wait("a", timeout_s=120) == "w"
    assert not lease.lost


def test_who_registers_takes_the_name_over(make_service: ServiceFactory) -> None:
    owner, other = make_service(), make_service()
    lease = owner.lease("a", "mine", ttl_s=60, owner="me")
    other.lease("a", "theirs", ttl_s=60, owner="other")
    with pytest.raises(NameExistsError):
        lease.update("mine again")
    assert other.get("a") == "theirs"


@pytest.mark.parametrize("owner", ["", "nobody"])
def test_owners_that_cannot_be_told_from_plain_records_are_refused(service: NameService, owner: str) -> None:
    with pytest.raises(ValueError, match="owner"):
        service.lease("a", "v", ttl_s=1, owner=owner)


def test_the_keepalive_survives_an_unexpected_error(
    make_service: ServiceFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, observer = make_service(), make_service()
    owner.lease("a", "v", ttl_s=SHORT_TTL_S, owner="me")
    raised = threading.Event()
    put: Callable[..., list[str]] = owner._put

    def fail_once(*args: Any, **kwargs: Any) -> list[str]:
        if not raised.is_set():
            raised.set()
            raise ZeroDivisionError("a bug in the backend")
        return put(*args, **kwargs)

    monkeypatch.setattr(owner, "_put", fail_once)
    assert raised.wait(20)
    add_for_a_while(observer, "reference", ttl_s=2 * SHORT_TTL_S)
    wait_until(lambda: observer.get_subtree("reference") == {}, "a record that lives longer expires")
    assert observer.get("a") == "v"


def test_a_backend_that_refuses_for_a_while_is_reported_once(
    make_service: ServiceFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = make_service()
    owner.lease("a", "v", ttl_s=0.03, owner="me")
    num_refusals = 0
    put: Callable[..., list[str]] = owner._put

    def refuse_three_times(*args: Any, **kwargs: Any) -> list[str]:
        nonlocal num_refusals
        num_refusals += 1
        if num_refusals <= 3:
            raise NameServiceError("out of memory")
        return put(*args, **kwargs)

    monkeypatch.setattr(owner, "_put", refuse_three_times)
    wait_until(lambda: num_refusals > 6, "the lease is refreshed again")
    refusals = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert refusals == ["keepalive cannot refresh a, trying on: out of memory"]


HOLDER = """
import sys, time
from pathlib import PosixPath
from tests.name_services import NamesAddress
service = {address!r}.connect()
service.lease("workers/victim", "alive", ttl_s=1.0, owner="victim")
print("leased", flush=True)
time.sleep(60)
"""


def test_the_lease_of_a_killed_process_expires() -> None:
    with running_names() as address, address.connect() as observer:
        command = [sys.executable, "-c", HOLDER.format(address=address)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            try:
                assert holder.stdout is not None and holder.stdout.readline() == "leased\n"
                add_for_a_while(observer, "reference", ttl_s=1.5)
                wait_until(lambda: observer.get_subtree("reference") == {}, "a record that lives longer expires")
                assert observer.get("workers/victim") == "alive"
            finally:
                holder.kill()
        wait_until(lambda: observer.get_subtree("workers") == {}, "the killed owner's lease expires")
        observer.lease("workers/victim", "successor", ttl_s=30, owner="successor")
        assert observer.get("workers/victim") == "successor"
