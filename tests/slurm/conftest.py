"""One throw-away cluster for all tests here; skipped with a reason where SLURM is missing, unless it is required."""

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing_programs, running_cluster


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    missing = missing_programs()
    if missing:
        reason = f"SLURM is not installed: no {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
        if os.environ.get("CORRAL_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, for commands of this process too."""
    for name, value in shared_cluster.environment.items():
        if name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, value)
    return shared_cluster
