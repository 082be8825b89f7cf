"""How others of the launcher reach a trial's Redis: by rdzv.json and the secrets."""

import json

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.name_resolve.base import NameService
from corral.name_resolve.keys import TrialKeys

REDIS_USERNAME = "trial"


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
