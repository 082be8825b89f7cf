"""Generation servers on nodes that may be taken away: a trial goes on with whatever it has, and loses nothing."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Material, Trial, make_material, submit
from tests.launcher.trials import wait_until
from tests.slurm.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ELASTIC = ("generation_server/1", "generation_server/2", "generation_server/3")
SETTINGS: dict[str, object] = {
    "cluster.bind_address": "127.0.0.1",
    "evaluation.every": "1000 steps",
    "control.commit_every": "5 steps",
    "groups.generation_server.elastic.count": len(ELASTIC),
    # One to a node of eight, so that a job with seven CPUs in the partition that comes first takes its node.
    "groups.generation_server.elastic.scheduling": "{partition: spot, cpu: 7, gpu: 0, mem: 1G}",
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(gpus=0) as own:
        yield own


@pytest.fixture
def trial(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    material: Material = make_material(tmp_path / "material")
    made = submit(
        "grpo",
        tmp_path / "trials",
        material,
        num_rows=800,
        pause_s=0.05,
        overrides=SETTINGS,
        where=(),
        environment=cluster.environment,
    )
    yield made
    cluster.run("scancel", "--user", "root")
    made.close()


def joins(trial: Trial) -> list[tuple[str, int]]:
    """Which server the manager let serve at which step, in order."""
    log = trial.directory.worker_log(0, "gserver_manager", 0)
    found = re.findall(r"(generation_server/\d+) joins at version \d+\.(\d+)", log.read_text() if log.exists() else "")
    return [(server, int(step)) for server, step in found]


def count(trial: Trial, event: str) -> int:
    return len(trial.events(event))


def wait(trial: Trial, look: Any, what: str) -> None:
    trial.wait_for(look, what, pause_s=0.2)


def test_servers_come_and_go_and_nothing_is_lost(trial: Trial, cluster: Cluster) -> None:
    come_and_go(trial, cluster)
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    # A server that had joined at weights of its own start would have made tokens of version 0.
    assert check_no_token_was_too_old(trial, eta=1) == 1
    assert all(step > 1 for _, step in joins(trial)[-2:])
    assert not trial.events("unit_restarting") and not trial.events("unit_given_up")
    wait_until(lambda: not cluster.run("squeue", "-h", "-t", "PD,R").stdout.strip(), "the end of all jobs")


def come_and_go(trial: Trial, cluster: Cluster) -> None:
    """Two of three elastic servers lose their nodes and get them back."""
    trial.wait_for_steps(1)
    wait(trial, lambda: len(joins(trial)) == 1 + len(ELASTIC), "every elastic server to join")
    assert count(trial, "extra_job_running") == len(ELASTIC)
    trial.wait_for_steps(4)

    taker = cluster.run(
        "sbatch",
        "--parsable",
        "--output=/dev/null",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=7",
        "--mem=100",
        "--wrap=sleep 600",
    ).stdout.strip()
    wait(
        trial,
        lambda: count(trial, "extra_job_gone") == 2 and count(trial, "unit_left") == 2,
        "two of them to be preempted",
    )
    trial.wait_for_steps(4)

    cluster.run("scancel", taker)
    wait(trial, lambda: len(joins(trial)) == 1 + len(ELASTIC) + 2, "both to be given back")
    # More, where SLURM has taken another one meanwhile: whom it preempts, and how often, is its own choice.
    assert count(trial, "extra_job_running") >= len(ELASTIC) + 2
    trial.wait_for_steps(4)
