"""Whoever takes a port of the trial hears no key: servers prove themselves before anything is said to them."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from corral.experiments.trial.trust import new_identity
from corral.name_resolve.base import NameServiceUnavailableError
from corral.name_resolve.redis import RedisNameService
from corral.workers.checkpoint.manifest import read_manifest
from corral.workers.generation.control import ControlClient
from corral.workers.generation.server_client import ServerError, call
from corral.workers.generation.sglang import _bound_socket
from corral.workers.streams.https import open_session
from corral.workers.weight_transport.filling import Filling, Held, StagingDeadline, whole
from corral.workers.weight_transport.staging import PeerFiles, Peers
from tests.strangers import Stranger
from tests.workers.generation.servers import ADMIN_KEY, API_KEY, LOOPBACK
from tests.workers.trusted import trust
from tests.workers.weight_transport.versions import make_version

DEADLINE_S = 30.0


@pytest.fixture(params=["plain", "tls"])
def stranger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stranger]:
    """One who speaks plainly, and one who has a certificate of the very same form."""
    certificate = ""
    if request.param == "tls":
        own = tmp_path / "own.pem"
        own.write_bytes(new_identity())
        certificate = str(own)
    with Stranger(certificate) as listens:
        yield listens


def hears_nothing(stranger: Stranger) -> None:
    stranger.wait_called()
    heard = stranger.everything_heard()
    for secret in (API_KEY, ADMIN_KEY, trust().path.read_text()):
        assert secret.encode() not in heard
    assert b"Authorization" not in heard and b"HTTP" not in heard


def test_a_stranger_on_a_servers_port_is_told_no_key(stranger: Stranger) -> None:
    async def ask() -> None:
        async with open_session(trust().client()) as session:
            await call(session, f"https://{LOOPBACK}:{stranger.port}/ready", key=API_KEY, timeout_s=DEADLINE_S)

    with pytest.raises(ServerError, match=f"{LOOPBACK}:{stranger.port}"):
        asyncio.run(ask())
    hears_nothing(stranger)


def test_a_stranger_on_a_workers_control_port_is_told_no_key(stranger: Stranger) -> None:
    async def probe() -> None:
        async with open_session(trust().client()) as session:
            client = ControlClient(session, api_key=API_KEY, admin_key=ADMIN_KEY, update_timeout_s=DEADLINE_S)
            await client.probe(f"https://{LOOPBACK}:{stranger.port}")

    with pytest.raises(ServerError, match=f"{LOOPBACK}:{stranger.port}"):
        asyncio.run(probe())
    hears_nothing(stranger)


def test_a_stranger_in_place_of_another_host_is_told_no_key_and_gives_no_weights(
    stranger: Stranger, tmp_path: Path
) -> None:
    weights, into = tmp_path / "v1", tmp_path / "into"
    into.mkdir()
    digest = make_version(weights, seed=1, suffix=".bin")
    source = f"https://{LOOPBACK}:{stranger.port}"
    patience = StagingDeadline.of("version 0.1", timeout_s=DEADLINE_S, given_up=threading.Event())
    peers = PeerFiles(Peers(ADMIN_KEY, trust().client()), digest, [source], patience)
    manifest = read_manifest(weights, digest)
    version = Filling(weights=weights, manifest=manifest, into=into, held=Held(()), on_progress=patience.check)
    arrived = version.fill(whole, peers.ways)
    assert peers.failed == {source} and arrived.bytes_received == 0
    hears_nothing(stranger)


def test_a_session_says_nothing_in_the_clear() -> None:
    async def ask() -> None:
        async with open_session(trust().client()) as session:
            await call(session, f"http://{LOOPBACK}:9/ready", key=API_KEY, timeout_s=DEADLINE_S)

    with pytest.raises(ServerError) as raised:
        asyncio.run(ask())
    assert isinstance(raised.value.__cause__, aiohttp.NonHttpUrlClientError)


def test_a_stranger_on_the_port_of_redis_is_told_no_password(stranger: Stranger) -> None:
    tls = trust().client()
    with RedisNameService(
        LOOPBACK, stranger.port, API_KEY, "corral/0/", "trial", tls=tls, unavailable_timeout_s=0.2
    ) as names:
        with pytest.raises(NameServiceUnavailableError, match=f"{LOOPBACK}:{stranger.port} is unreachable"):
            names.get("workers/master_worker/0")
    hears_nothing(stranger)


def test_the_port_of_a_server_that_still_loads_is_nobody_elses() -> None:
    with _bound_socket(LOOPBACK) as bound:
        port = bound.getsockname()[1]
        for host in (LOOPBACK, "0.0.0.0"):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="already in use"):
                    other.bind((host, port))
