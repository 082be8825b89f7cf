"""The attempt's Redis server, as one of the supervisor's restart units, and how others of the launcher reach it."""

import json
import os
import signal

from corral.experiments.redis_server import RedisServer
from corral.experiments.secrets import TrialSecrets
from corral.experiments.trial_directory import TrialDirectory
from corral.launcher.redis_probe import RedisProbe
from corral.name_resolve.base import NameService
from corral.name_resolve.keys import TrialKeys

REDIS_USERNAME = "trial"


class TrialRedis:
    """A Redis server that can be started again on its port."""

    def __init__(
        self,
        *,
        directory: TrialDirectory,
        trial_uuid: str,
        secrets: TrialSecrets,
        attempt: int,
        host: str,
        probe: RedisProbe | None = None,
    ) -> None:
        folder = directory.control_path / "redis"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._server = RedisServer(
            directory=folder,
            password=secrets.redis_password.reveal(),
            key_prefix=TrialKeys(trial_uuid).prefix,
            host=host,
            username=REDIS_USERNAME,
            log_path=directory.attempt_logs(attempt) / "redis.log",
        )
        self._has_started = False
        self._probe = probe or RedisProbe()

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def address(self) -> tuple[str, int]:
        return self._server.host, self._server.port

    def start(self) -> None:
        if self._has_started:
            self._server.restart()
        else:
            self._server.start()
        self._has_started = True
        self._probe.begin(self.address)

    def poll(self) -> int | None:
        return self._server.poll()

    def is_frozen(self) -> bool:
        return self._server.is_running() and self._probe.is_frozen

    def kill(self) -> None:
        self._probe.end()
        if self._server.is_running():
            os.kill(self._server.pid, signal.SIGKILL)  # nothing in it is durable


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
        unavailable_timeout_s=timeout_s,
    )
