"""Hosts that give each other versions: whatever a source does, what is staged is what was published."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import psutil
import pytest
from aiohttp import web

from corral.experiments.trial.guarded_listener import GuardedListener
from corral.workers.checkpoint.manifest import CorruptCheckpointError, Manifest, read_manifest
from corral.workers.checkpoint.published_weights import PublishedWeights
from corral.workers.generation import control
from corral.workers.generation.server_client import ServerError
from corral.workers.weight_transport.filling import Arrived, Filling, Held, StagingDeadline, whole
from corral.workers.weight_transport.staging import PeerFiles, Peers, by_deltas
from tests.strangers import asking, check_only_the_silent_are_closed
from tests.workers.backends.trained_versions import publish, random_weights, stepped
from tests.workers.checkpoint.sealing import describe
from tests.workers.generation.hosts import TRIAL, Host, Hosts, running_hosts
from tests.workers.generation.servers import ADMIN_KEY, API_KEY, DEADLINE_S, LOOPBACK, wait_until
from tests.workers.trusted import connection_to, trust
from tests.workers.weight_transport.versions import LONG_S, content_of, flip_a_byte, patience

MANIFEST_ONLY = 4096
"""Bytes; manifests are read from the shared file system, and are smaller."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with running_hosts(tmp_path) as running:
        yield running


def memory_of(host: Host, published: PublishedWeights) -> Path:
    assert published.digest is not None
    return host.memory / f"corral-weights-{TRIAL}" / published.digest


def get(url: str, path: str, *, key: str | None = ADMIN_KEY) -> tuple[int, bytes]:
    """What a worker answers to a path that nobody has put in order before."""
    connection = connection_to(url, timeout_s=LONG_S)
    try:
        connection.putrequest("GET", path)
        if key is not None:
            connection.putheader("Authorization", f"Bearer {key}")
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_connection_without_the_key_of_a_control_port_is_closed_and_one_with_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "GuardedListener", partial(GuardedListener, timeout_s=3.0))
    with running_hosts(tmp_path) as hosts:
        address = (LOOPBACK, urlsplit(hosts.add().control).port or 0)
        check_only_the_silent_are_closed(address, trust().client(), asking("/weights", ADMIN_KEY))


def test_a_version_comes_from_another_host_and_its_cost_is_told_apart(hosts: Hosts) -> None:
    giver, receiver = hosts.add(), hosts.add()
    published = hosts.publish(1)
    assert hosts.stage(giver, published).is_held
    staged = hosts.stage(receiver, published, giver.control)
    assert staged.is_held and staged.failed_sources == []
    assert content_of(memory_of(receiver, published)) == content_of(published.directory)
    assert receiver.num_read == 0
    hosts.bring_to(receiver, published)
    update = receiver.updates.last
    assert update is not None and (update.bytes_received, update.version) == (5_000_018, "0.1")
    assert 0 < update.bytes_read < MANIFEST_ONLY and update.staged_s > 0.0
    assert receiver.content() == content_of(published.directory)


def test_a_source_that_gives_other_bytes_is_refused_and_another_one_is_taken(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, right, receiver = (hosts.add() for _ in range(3))
    published = hosts.publish(1)
    for giver in (wrong, right):
        hosts.stage(giver, published)
    flip_a_byte(memory_of(wrong, published) / "model-00000.bin")
    staged = hosts.stage(receiver, published, wrong.control, right.control)
    assert staged.failed_sources == [wrong.control] and receiver.num_read == 0
    assert content_of(memory_of(receiver, published)) == content_of(published.directory)
    assert f"{wrong.control}/weights/{published.digest}/model-00000.bin: expected BLAKE3" in caplog.text


def test_where_no_source_gives_it_the_shared_file_system_is_read(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    other, receiver = hosts.add(), hosts.add()
    published = hosts.publish(1)
    hosts.stage(other, hosts.publish(2))  # another version than the one that it is asked for
    nobody = "http://127.0.0.1:9"  # the port of `discard`
    staged = hosts.stage(receiver, published, other.control, nobody)
    assert staged.is_held and staged.failed_sources == sorted([other.control, nobody])
    assert content_of(memory_of(receiver, published)) == content_of(published.directory)
    assert f"answered 404: this worker does not hold {published.digest}" in caplog.text
    assert "3 of 3 files of" in caplog.text and "are read from the shared file system" in caplog.text
    flip_a_byte(published.directory / "model-00000.bin")
    with pytest.raises(ServerError, match="were refused: .*model-00000.bin: expected BLAKE3"):
        hosts.stage(other, published, nobody)


def test_what_no_delta_leads_to_comes_from_another_host(hosts: Hosts) -> None:
    giver, receiver = hosts.add(), hosts.add()
    giver.encode = receiver.encode = by_deltas
    weights = random_weights(0, shape=(100, 330))
    first = publish(hosts.shared / "v1", weights, max_shard_bytes=133_000)
    second = publish(
        hosts.shared / "v2", stepped(weights, share=0.02, seed=1), base=first.path, max_shard_bytes=133_000
    )
    for version in (first, second):
        giver.transport.stage("0", version.path, version.digest, timeout_s=LONG_S)
    receiver.transport.stage("0.1", first.path, first.digest, timeout_s=LONG_S)
    name = "model-00002-of-00003.safetensors"
    (second.path / name).unlink()
    flip_a_byte(second.path / f"{name}.delta")
    staged = receiver.transport.stage("0.2", second.path, second.digest, timeout_s=LONG_S, sources=[giver.control])
    served = {file: entry for file, entry in second.files.items() if not file.endswith(".delta")}
    assert describe(staged.path) == served
    assert staged.bytes_received == second.files[name].size and 0 < staged.bytes_read < staged.bytes_received


def test_only_files_of_the_version_that_is_held_are_given_and_only_for_the_administrators_key(hosts: Hosts) -> None:
    giver = hosts.add()
    held, other = hosts.publish(1), hosts.publish(2)
    hosts.stage(giver, held)
    root = f"/weights/{held.digest}"
    name = "model-00001.bin"
    assert get(giver.control, f"{root}/{name}") == (200, (held.directory / name).read_bytes())
    for key in (None, "", API_KEY, ADMIN_KEY + "x"):
        assert get(giver.control, f"{root}/{name}", key=key)[0] == 401
    (giver.memory / "secret").write_text("not for others")
    (memory_of(giver, held) / "unlisted").write_text("not for others")
    for path in (
        f"/weights/{other.digest}/{name}",
        f"{root}/unlisted",
        f"{root}/manifest.json",
        f"{root}/",
        f"{root}/./{name}",
        f"{root}/../{held.digest}/{name}",
        f"{root}/../../secret",
        f"{root}/%2e%2e/%2e%2e/secret",
        f"{root}/..%2f..%2fsecret",
        f"{root}//etc/passwd",
        f"{root}/%2fetc%2fpasswd",
        f"/weights/../{name}",
        "/weights/%2e%2e/secret",
        f"/weights/{'0' * 64}/{name}",
    ):
        status, body = get(giver.control, path)
        assert status == 404 and b"not for others" not in body, path
    with pytest.raises(ServerError, match="answered 401"):
        hosts.stage(giver, other, key=API_KEY)


def fill(weights: Path, manifest: Manifest, into: Path, patience: StagingDeadline, peers: PeerFiles) -> Arrived:
    """A version on a host that holds none."""
    version = Filling(weights=weights, manifest=manifest, into=into, held=Held(()), on_progress=patience.check)
    return version.fill(whole, peers.ways)


@dataclass(frozen=True, slots=True)
class Interrupted(StagingDeadline):
    """Does something at the first piece that has come."""

    do: Callable[[], None]

    def check(self) -> None:
        self.do()


def test_a_source_that_is_killed_in_the_middle_is_left_for_the_next(hosts: Hosts, tmp_path: Path) -> None:
    published = hosts.publish(1, sizes=(24_000_000, 17))  # more than sockets hold
    assert published.digest is not None
    other = hosts.add()
    hosts.stage(other, published)
    (tmp_path / "killed").mkdir()
    (tmp_path / "into").mkdir()
    giver = subprocess.Popen(
        [sys.executable, "-m", "tests.workers.generation.giving_process", str(tmp_path / "killed")]
        + [published.weights, published.digest],
        stdout=subprocess.PIPE,
        text=True,
    )
    with giver:
        assert giver.stdout is not None
        control = giver.stdout.readline().strip()
        was_asked = get(control, f"/weights/{published.digest}/model-00001.bin")[0] == 200

        def kill() -> None:
            giver.kill()
            giver.wait(LONG_S)

        calm = patience()
        killing = Interrupted(calm.what, calm.timeout_s, calm.deadline, calm.given_up, kill)
        manifest = read_manifest(published.directory, published.digest)
        files = {"model-00000.bin": manifest.files["model-00000.bin"]}
        peers = PeerFiles(Peers(ADMIN_KEY, trust().client()), published.digest, [control, other.control], killing)
        manifest = type(manifest)(files=files, extra={})
        arrived = fill(published.directory, manifest, tmp_path / "into", killing, peers)
    assert was_asked and peers.failed == {control} and arrived.bytes_received == 24_000_000
    assert arrived.bytes_read < MANIFEST_ONLY


def open_files() -> set[str]:
    """Of this process."""
    return {file.path for file in psutil.Process().open_files()}


def test_a_receiver_that_takes_nothing_holds_no_file_for_ever(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_SLOWEST_BYTES_PER_S", 1e9)
    monkeypatch.setattr(control, "_LONGEST_PAUSE_S", 0.1)
    published = hosts.publish(1, sizes=(24_000_000, 17))  # more than sockets hold
    directory, name = published.directory, "model-00000.bin"

    async def start() -> web.AppRunner:
        application = web.Application()
        give = partial(control.give_weights, lambda digest: directory)
        application.add_routes([web.get(control.GIVEN_PATH, give)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, 0).start()
        return runner

    runner = hosts.run(start())
    try:
        with socket.create_connection(runner.addresses[0], timeout=LONG_S) as receiver:
            receiver.sendall(f"GET /weights/{published.digest}/{name} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            num_bytes = len(receiver.recv(10))
            wait_until(lambda: str(directory / name) not in open_files(), "the file to be closed")
            with suppress(ConnectionResetError):
                while data := receiver.recv(2**20):
                    num_bytes += len(data)
        assert num_bytes < 24_000_000
    finally:
        hosts.run(runner.cleanup())


@contextmanager
def source_that(answer: Callable[[IO[bytes]], None]) -> Iterator[str]:
    """Its URL; `answer` writes what it says to each request, and the connection stays open."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        listening.settimeout(LONG_S)
        connections: list[socket.socket] = []
        tls = trust().server()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                try:
                    connection = tls.wrap_socket(connection, server_side=True)
                    connections.append(connection)
                    connection.recv(65536)
                    with connection.makefile("wb") as file:
                        answer(file)
                except OSError:
                    pass  # the receiver has gone

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"https://{LOOPBACK}:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(DEADLINE_S)
            for connection in connections:
                connection.close()


def head(length: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length


def trickle(file: IO[bytes]) -> None:
    """One byte after the other, and never all of them."""
    file.write(head(5_000_001))
    while True:
        file.write(b"x")
        file.flush()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda file: None, "did not answer: The read operation timed out"),
        (lambda file: file.write(head(5_000_001) + b"abc"), "bytes to come: The read operation timed out"),
        (lambda file: file.write(head(5_000_002)), "expected 5000001 bytes, got 5000002"),
        (lambda file: file.write(b"HTTP/1.1 200 OK\r\n\r\nabc"), "expected 5000001 bytes, got None"),
        (lambda file: file.write(b"no HTTP\r\n\r\n"), "did not answer: no HTTP"),
        (trickle, "took 1% of the time"),
    ],
    ids=["silent", "silent in the middle", "too much", "no length", "no HTTP", "too slow"],
)
def test_a_source_that_does_not_speak_as_it_should_costs_time_and_nothing_else(
    hosts: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: Callable[[IO[bytes]], None], reason: str
) -> None:
    published = hosts.publish(1, sizes=(5_000_001,))
    assert published.digest is not None
    (tmp_path / "into").mkdir()
    with source_that(answer) as source:
        asking = Peers(ADMIN_KEY, trust().client(), silence_s=0.2, fraction_of_time=0.01)
        peers = PeerFiles(asking, published.digest, [source], patience())
        manifest = read_manifest(published.directory, published.digest)
        arrived = fill(published.directory, manifest, tmp_path / "into", patience(), peers)
    assert peers.failed == {source} and arrived.bytes_received == 0
    assert content_of(tmp_path / "into") == content_of(published.directory)
    assert reason in caplog.text


def test_a_manifest_that_names_other_places_is_refused_before_anything_is_asked_for(
    hosts: Hosts, tmp_path: Path
) -> None:
    published = hosts.publish(1)
    manifest = read_manifest(published.directory, published.digest)
    manifest.files["../outside"] = manifest.files["model-00001.bin"]
    with pytest.raises(CorruptCheckpointError, match="expected names inside of it"):
        peers = PeerFiles(Peers(ADMIN_KEY, trust().client()), "0" * 64, ["http://127.0.0.1:9"], patience())
        fill(published.directory, manifest, tmp_path, patience(), peers)
    assert not (tmp_path.parent / "outside").exists()
