"""How the processes of a trial find each other and see who is alive; start reading at `base.py`."""

from corral.name_resolve.base import NameService
from corral.name_resolve.errors import (
    NameExistsError,
    NameNotFoundError,
    NameServiceError,
    NameServiceUnavailableError,
    NameTimeoutError,
)
from corral.name_resolve.keys import TrialKeys
from corral.name_resolve.lease import Lease
from corral.name_resolve.redis import RedisNameService

__all__ = [
    "Lease",
    "NameExistsError",
    "NameNotFoundError",
    "NameService",
    "NameServiceError",
    "NameServiceUnavailableError",
    "NameTimeoutError",
    "RedisNameService",
    "TrialKeys",
]
