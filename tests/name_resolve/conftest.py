"""A real Redis for the session, and a factory of services that share one store, for each backend."""

import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from corral.launcher.trial.redis_server import REDIS_USERNAME, RedisServer
from corral.name_resolve.base import NameService, Put
from corral.name_resolve.redis import RedisNameService
from tests.name_services import MemoryNameService, MemoryStore, running
from tests.workers.trusted import trust

PASSWORD = secrets.token_hex(16)
TRIAL_PREFIX = "corral/0123456789abcdef0123456789abcdef/"

ServiceFactory = Callable[[], NameService]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(make_server(tmp_path_factory.mktemp("redis"))) as server:
        yield server


def make_server(folder: Path) -> RedisServer:
    log_path = folder / "redis.log"
    return RedisServer(password=PASSWORD, trust=trust(), key_prefix=TRIAL_PREFIX, log_path=log_path)


@pytest.fixture
def own_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    with running(make_server(tmp_path)) as server:
        yield server


_test_numbers = itertools.count()


def connect(
    server: RedisServer, *, prefix: str = TRIAL_PREFIX, unavailable_timeout_s: float = 10.0
) -> RedisNameService:
    return RedisNameService(
        *server.address,
        PASSWORD,
        prefix,
        REDIS_USERNAME,
        tls=trust().client(),
        unavailable_timeout_s=unavailable_timeout_s,
    )


@pytest.fixture(params=["memory", "redis"])
def make_service(request: pytest.FixtureRequest) -> Iterator[ServiceFactory]:
    """Each call gives another service on the same store, as if in another process."""
    factory = _factory(request)
    with ExitStack() as services:
        yield lambda: services.enter_context(factory())


def _factory(request: pytest.FixtureRequest) -> ServiceFactory:
    if request.param == "memory":
        store = MemoryStore()
        return lambda: MemoryNameService(store)
    server: RedisServer = request.getfixturevalue("redis_server")
    prefix = f"{TRIAL_PREFIX}test-{next(_test_numbers)}/"
    return lambda: connect(server, prefix=prefix)


@pytest.fixture
def service(make_service: ServiceFactory) -> NameService:
    return make_service()


@pytest.fixture
def redis_service(own_redis_server: RedisServer) -> Iterator[RedisNameService]:
    with connect(own_redis_server) as names:
        yield names


def wait_until(condition: Callable[[], bool], description: str, timeout_s: float = 120) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s until {description}"
        time.sleep(0.01)


def add_for_a_while(service: NameService, name: str, *, ttl_s: float) -> None:
    """A record that nobody refreshes."""
    service._put([Put(name=name, value="x", owner="somebody", ttl_s=ttl_s, replace=True)])
