from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corral.experiments.trial.secrets import TrialSecrets
from corral.workers.streams.security import StreamSecurity
from tests.workers.stream_helpers import security_of


@pytest.fixture
def secrets_directory(tmp_path: Path) -> Path:
    """Secrets of a new trial."""
    TrialSecrets.create(tmp_path / "secrets")
    return tmp_path / "secrets"


@pytest.fixture
def as_role(secrets_directory: Path) -> Iterator[Callable[[str], StreamSecurity]]:
    """Makes the socket factory of a process with this role; it can only be closed once all streams are."""
    made: list[StreamSecurity] = []

    def make(role: str) -> StreamSecurity:
        made.append(security_of(secrets_directory, role))
        return made[-1]

    yield make
    for security in made:
        security.close()


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[StreamSecurity]:
    """A rollout worker of another trial."""
    (tmp_path / "other").mkdir(mode=0o700)
    TrialSecrets.create(tmp_path / "other" / "secrets")
    with security_of(tmp_path / "other" / "secrets", "rollout_worker") as security:
        yield security
