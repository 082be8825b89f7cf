"""rl-doctor on a real SLURM: a probe that answers, one that cannot start, and a controller that is down."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corral.launcher.doctor.look import judge_probe, probe
from corral.launcher.slurm.client import SlurmClient
from tests.slurm.cluster import Cluster, running_cluster

pytestmark = pytest.mark.slurm

BIN = Path(sys.executable).parent


def rl_doctor(cluster: Cluster, fileroot: Path, *options: str, exit_code: int = 0) -> dict[str, Any]:
    command = [str(BIN / "rl-doctor"), "--fileroot", str(fileroot), "-o", "json", *options]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return {one["check"]: one for one in json.loads(done.stdout)}


def test_a_probe_of_two_nodes_answers_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    fileroot = tmp_path / "it's a $(root)"
    said = rl_doctor(cluster, fileroot)
    assert not [one for one in said.values() if one["level"] == "fail"]
    assert "22.05" in said["slurm.version"]["said"] or said["slurm.version"]["level"] == "ok"
    for check in ("nodes.fileroot", "nodes.ownership", "nodes.python", "nodes.slurm", "login.ports", "nodes.clocks"):
        assert said[check]["level"] == "ok", said[check]
    assert " reaches a port of " in said["nodes.ports"]["said"]
    assert "8 x gpu" in said["partition.debug"]["said"]
    assert list(fileroot.iterdir()) == []
    assert cluster.run("squeue", "-h", "-n", "rl-doctor", "-t", "PD,R").stdout == ""


def test_a_partition_of_one_node_and_a_minute_is_probed_too(cluster: Cluster, tmp_path: Path) -> None:
    said = rl_doctor(cluster, tmp_path, "--partition", "short")
    assert "seen by n1;" in said["nodes.fileroot"]["said"]
    unknown = rl_doctor(cluster, tmp_path, "--partition", "nosuch", exit_code=1)
    assert "debug, short, spot" in unknown["nodes"]["advice"]


def test_quick_submits_nothing(cluster: Cluster, tmp_path: Path) -> None:
    before = SlurmClient().states()
    assert "--quick" in rl_doctor(cluster, tmp_path, "--quick")["nodes"]["said"]
    assert set(SlurmClient().states()) <= set(before)


def test_a_probe_that_cannot_start_says_for_what_it_waits(cluster: Cluster, tmp_path: Path) -> None:
    # More nodes than the partition gives to a job: accepted by sbatch, and never started.
    cluster.run("scontrol", "update", "partitionname=spot", "maxnodes=1")
    try:
        outcome = probe(SlurmClient(), tmp_path, partition="spot", num_nodes=2, timeout_s=20.0)
    finally:
        cluster.run("scontrol", "update", "partitionname=spot", "maxnodes=UNLIMITED")
    (finding,) = judge_probe(outcome, fileroot=tmp_path, runtime=None)
    assert finding.level == "warn" and "can never start (Partition" in finding.said
    assert list(tmp_path.iterdir()) == []


def test_a_python_that_does_not_start_on_the_nodes_is_told(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    outcome = probe(SlurmClient(), tmp_path, partition=None, num_nodes=1)
    (finding,) = judge_probe(outcome, fileroot=tmp_path, runtime=None)
    assert (finding.check, finding.level) == ("nodes.python", "fail") and "/nowhere/bin/python" in finding.said


def test_a_controller_that_is_down_is_told_with_its_own_exit_code(tmp_path: Path) -> None:
    with running_cluster(num_nodes=1) as cluster:
        cluster.stop_controller()
        said = rl_doctor(cluster, tmp_path, exit_code=4)
    assert "Unable to contact slurm controller" in said["slurm"]["said"] and said["redis"]["level"] == "ok"
