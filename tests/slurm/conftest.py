"""Throw-away clusters that tests share, each started by the first test that wants it.

Where SLURM is missing they are skipped with a reason, unless it is required.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from corral.launcher.commands.submit import main as submit_command
from corral.launcher.slurm.client import SlurmClient
from tests.integration.trial_helpers import Material, Trial, make_material, submit
from tests.launcher.trials import wait_until
from tests.slurm.cluster import Cluster, missing_programs, running_cluster
from tests.slurm.trials import SITE, SMALL, SlurmTrial, job_of


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    require_programs(accounts=False)
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shared_accounting_cluster() -> Iterator[Cluster]:
    require_programs(accounts=True)
    with running_cluster(num_nodes=2, accounts=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shared_threaded_cluster() -> Iterator[Cluster]:
    require_programs(accounts=False)
    with running_cluster(num_nodes=2, threads_per_core=2) as cluster:
        yield cluster


def require_programs(*, accounts: bool) -> None:
    missing = missing_programs(accounts=accounts)
    if missing:
        reason = f"SLURM is not installed: no {', '.join(missing)} (Debian and Ubuntu: make setup-slurm)"
        if os.environ.get("CORRAL_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


def for_this_process(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name, value in cluster.environment.items():
        if name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, value)
    return cluster


@pytest.fixture
def cluster(shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, for commands of this process too."""
    return for_this_process(shared_cluster, monkeypatch)


@pytest.fixture
def accounting_cluster(shared_accounting_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Two nodes, and the accounts and limits of accounting.py."""
    return for_this_process(shared_accounting_cluster, monkeypatch)


@pytest.fixture
def threaded_cluster(shared_threaded_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Two nodes of four cores with two threads each."""
    return for_this_process(shared_threaded_cluster, monkeypatch)


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
        # Extra jobs and successors carry the same tag.
        for job in SlurmClient().queue() if trial.job_id else []:
            if job.tag.get("trial_uuid") == trial.plan.trial.uuid:
                cluster.run("scancel", job.job_id)
                wait_until(partial(has_ended, job.job_id), f"the end of job {job.job_id}")
        trial.close()


@dataclass(frozen=True)
class Ended:
    """What a command has printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def rl_submit(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command, in this process."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Ended:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["rl-submit", *arguments])
        with pytest.raises(SystemExit) as end:
            raise SystemExit(submit_command())
        return Ended(int(end.value.code or 0), *capfd.readouterr())

    return run


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
