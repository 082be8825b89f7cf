"""An identity for servers of tests, made once for a process and those that it starts, and connections to who has it."""

import http.client
import os
import tempfile
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.retry import Retry

from corral.experiments.trial.directory import write_new_file
from corral.experiments.trial.trust import Trust, new_identity
from corral.name_resolve.redis import ProvedConnection

_FOLDER = "CORRAL_TEST_IDENTITY"


@cache
def trust() -> Trust:
    if _FOLDER in os.environ:
        return Trust(Path(os.environ[_FOLDER]))
    made = Trust(Path(tempfile.mkdtemp(prefix="trusted-")))
    write_new_file(made.path, new_identity())
    os.environ[_FOLDER] = str(made.secrets_directory)
    return made


def redis_client(
    host: str, port: int, *, username: str | None, password: str | None, by: Trust | None = None
) -> redis.Redis:
    """Tries once: a refusal does not change by asking again."""
    pool = ConnectionPool(
        connection_class=ProvedConnection,
        tls=(by or trust()).client(),
        host=host,
        port=port,
        username=username,
        password=password,
        decode_responses=True,
        retry=Retry(NoBackoff(), 0),
    )
    return redis.Redis.from_pool(pool)


def connection_to(url: str, *, timeout_s: float) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection(urlsplit(url).netloc, timeout=timeout_s, context=trust().client())
