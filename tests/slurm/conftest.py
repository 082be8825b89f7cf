"""One throw-away cluster for all tests here; skipped with a reason where SLURM is missing, unless it is required."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from corral.launcher.slurm import SlurmClient
from tests.integration.trial_helpers import Material, Trial, make_material, submit
from tests.launcher.trials import wait_until
from tests.slurm.cluster import Cluster, missing_programs, running_cluster
from tests.slurm.trials import SITE, SMALL, SlurmTrial, job_of


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


@pytest.fixture
def make_slurm_trial(cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    """Makes trials of stub workers for this cluster; whatever of them is left is ended after the test."""
    trials: list[SlurmTrial] = []

    def make(behaviour: Mapping[str, Sequence[str]], *, folder: str = ".", **plan: Any) -> SlurmTrial:
        trials.append(SlurmTrial(tmp_path / folder, behaviour, **(SMALL | plan)))
        return trials[-1]

    yield make

    def has_ended(job_id: str) -> bool:
        return not cluster.run("squeue", "-h", "-j", job_id, "-t", "R,CG").stdout.strip()

    for trial in trials:
        # Members and successors carry the same tag.
        for job in SlurmClient().queue() if trial.job_id else []:
            if job.tag.get("trial_uuid") == trial.plan.trial.uuid:
                cluster.run("scancel", job.job_id)
                wait_until(partial(has_ended, job.job_id), f"the end of job {job.job_id}")
        trial.close()


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture
def start_job(cluster: Cluster, material: Material, tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    """Submits a recipe to the throw-away cluster; its job is cancelled after the test if it is still there."""
    trials: list[Trial] = []

    def start(recipe: str, *, overrides: Mapping[str, object], **options: Any) -> Trial:
        trials.append(
            submit(
                recipe,
                tmp_path / recipe,
                material,
                overrides={**SITE, **overrides},
                where=(),
                environment=cluster.environment,
                **options,
            )
        )
        return trials[-1]

    yield start
    for trial in trials:
        cluster.run("scancel", job_of(trial))
        trial.close()
