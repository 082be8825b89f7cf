"""Generation servers on nodes that may be taken away: a trial goes on with whatever it has, and loses nothing."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from corral.launcher.trial.processes import trial_processes
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
    # Generation is what a step waits for.
    "rollout.sampling.max_new_tokens": 48,
    "engine.max_running_requests": 1,
    "groups.generation_server.elastic.count": len(ELASTIC),
    # One to a node of eight, so that a job with seven CPUs in the partition that comes first takes its node.
    "groups.generation_server.elastic.scheduling": "{partition: spot, cpu: 7, gpu: 0, mem: 1G}",
}


SLOW_S, FAST_S = 0.3, 0.01
"""What a reward takes: while SLURM is waited for, so that the trial lasts, and while its throughput is looked at."""


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
        pause_s=SLOW_S,
        overrides=SETTINGS,
        where=(),
        environment=cluster.environment,
    )
    yield made
    cluster.run("scancel", "--user", "root")
    made.close()


class SmallNodes:
    """Gives every generation server a tenth of a core, so that four of them do more than two on any machine."""

    PERIOD_S, SHARE = 0.05, 0.1

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._is_over = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> "SmallNodes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        pids: list[int] = []
        looked_at = 0.0
        while not self._is_over.is_set():
            if time.monotonic() - looked_at > 1.0:
                pids, looked_at = list(self._servers()), time.monotonic()
            _signal(pids, signal.SIGCONT)
            time.sleep(self.PERIOD_S * self.SHARE)
            _signal(pids, signal.SIGSTOP)
            time.sleep(self.PERIOD_S * (1.0 - self.SHARE))
        _signal(pids, signal.SIGCONT)

    def _servers(self) -> Iterator[int]:
        for pid in trial_processes(self._trial.uuid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"corral.workers" in words and b"generation_server" in words:
                yield pid


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def joins(trial: Trial) -> list[tuple[str, int]]:
    """Which server the manager let serve at which step, in order."""
    log = trial.directory.worker_log(0, "gserver_manager", 0)
    found = re.findall(r"(generation_server/\d+) joins at version \d+\.(\d+)", log.read_text() if log.exists() else "")
    return [(server, int(step)) for server, step in found]


def count(trial: Trial, event: str) -> int:
    return len(trial.events(event))


def wait(trial: Trial, look: Any, what: str) -> None:
    trial.wait_for(look, what, pause_s=0.2)


def show_throughput(trial: Trial, what: str) -> None:
    """Prints what a phase of the trial has trained on per second."""
    trial.pace(FAST_S)
    with SmallNodes(trial):
        trial.wait_for_steps(1)
        num_before = len(trial.metrics())
        trial.wait_for_steps(4)
        lines = trial.metrics()[num_before - 1 :]
    trial.pace(SLOW_S)
    seconds = lines[-1]["time"] - lines[0]["time"]
    tokens = sum(line.get("train/tokens", 0) for line in lines[1:])
    print(f"{what}: {tokens / seconds:.0f} tokens per s")


def test_servers_come_and_go_and_nothing_is_lost(trial: Trial, cluster: Cluster) -> None:
    come_and_go(trial, cluster)
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    # A server that had joined at weights of its own start would have made tokens of version 0.
    assert check_no_token_was_too_old(trial, eta=1) == 1
    print("joins:", ", ".join(f"{server} at step {step}" for server, step in joins(trial)))
    assert all(step > 1 for _, step in joins(trial)[-2:])
    assert not trial.events("unit_restarting") and not trial.events("unit_given_up")
    wait_until(lambda: not cluster.run("squeue", "-h", "-t", "PD,R").stdout.strip(), "the end of all jobs")


def come_and_go(trial: Trial, cluster: Cluster) -> None:
    """Two of three elastic servers lose their nodes and get them back."""
    trial.wait_for_steps(1)
    wait(trial, lambda: len(joins(trial)) == 1 + len(ELASTIC), "every elastic server to join")
    assert count(trial, "extra_job_running") == len(ELASTIC)
    show_throughput(trial, "with 4 servers, three of them elastic")

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
    show_throughput(trial, "with 2")

    cluster.run("scancel", taker)
    wait(trial, lambda: len(joins(trial)) == 1 + len(ELASTIC) + 2, "both to be given back")
    # More, where SLURM has taken another one meanwhile: whom it preempts, and how often, is its own choice.
    assert count(trial, "extra_job_running") >= len(ELASTIC) + 2
    show_throughput(trial, "with 4 again")
