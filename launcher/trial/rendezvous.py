"""The trial's Redis server, and how others of the launcher reach it: by rdzv.json and the secrets."""

import contextlib
import json

import msgspec

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.experiments.trial.worker_record import WorkerRecord
from corral.launcher.trial.redis_server import REDIS_USERNAME, RedisServer
from corral.name_resolve.base import NameService
from corral.name_resolve.keys import TrialKeys


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
