"""The attempt's Redis server, as one of the supervisor's restart units."""

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.launcher.supervisor.redis_probe import RedisProbe
from corral.launcher.trial.redis_server import RedisServer
from corral.launcher.trial.rendezvous import REDIS_USERNAME
from corral.name_resolve.keys import TrialKeys


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
        trust = Trust(directory.secrets_path)
        self._server = RedisServer(
            directory=folder,
            trust=trust,
            password=secrets.redis_password.reveal(),
            key_prefix=TrialKeys(trial_uuid).prefix,
            host=host,
            username=REDIS_USERNAME,
            log_path=directory.attempt_logs(attempt) / "redis.log",
        )
        self._probe = probe or RedisProbe(trust=trust)

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def address(self) -> tuple[str, int]:
        return self._server.host, self._server.port

    def start(self) -> None:
        self._server.restart()
        self._probe.begin(self.address)

    def poll(self) -> int | None:
        return self._server.poll()

    def is_frozen(self) -> bool:
        return self._server.is_running() and self._probe.is_frozen

    def kill(self) -> None:
        self._probe.end()
        self._server.kill()
