"""rl-doctor's probe: a job of one small task on one or two nodes reads a canary file, and answers.

    login node   {fileroot}/.rl-doctor-XXXX/canary --sbatch--> job --srun--> node.py on each node
                 <--exit code, where it got no further--         `--> answer-N.json, port-0.json --> findings

    exit code of the job   0 answered · 41 the canary did not appear on the node · 42 Python or corral did not start

Bounded: a job that has not answered in time is cancelled, and that it waited is the finding.
"""

import json
import os
import secrets as random_tokens
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.experiments.config.cluster import ClusterConfig
from corral.experiments.trial.directory import atomic_write
from corral.launcher.cluster.jobs import JobPhase
from corral.launcher.doctor.node import FIRST_PORT, exchange, is_there
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.slurm.sbatch import render_shipped
from corral.launcher.slurm.verdict import job_of_scontrol
from corral.scheduling.slurm_formats import MemoryRules

TIMEOUT_S = 60.0
EXIT_NO_CANARY = 41
EXIT_NO_PYTHON = 42
NODE_WAIT_S = 30
_MEM_MB = 256
_POLL_INTERVAL_S = 0.2
_QUEUE_INTERVAL_S = 2.0


@dataclass(slots=True, kw_only=True)
class ProbeOutcome:
    """What came back."""

    num_nodes: int = 0
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By rank of the node."""
    state: str = ""
    """Last word of SLURM for the job."""
    reason: str = ""
    exit_code: int | None = None
    waited_s: float = 0.0
    """From sbatch to the first answer."""
    login_offset_s: float | None = None
    """Clock of the first node minus ours."""
    login_error: str = ""
    logs: dict[int, str] = field(default_factory=dict)


def probe(
    client: SlurmClient,
    fileroot: Path,
    *,
    partition: str | None,
    num_nodes: int,
    cluster: ClusterConfig | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ProbeOutcome:
    """Runs the job and collects what it says; nothing of it is left afterwards.

    Args:
        partition: where it runs; None is the default partition.
        cluster: how this site gives out memory; None is the usual way.

    Raises:
        SlurmError: if sbatch refuses it.
    """
    folder = fileroot / f".rl-doctor-{random_tokens.token_hex(4)}"
    folder.mkdir(mode=0o700)
    job_id = ""
    try:
        atomic_write(folder / "canary", random_tokens.token_hex(16).encode())
        script = folder / "probe.sbatch"
        text = render_shipped(
            "probe.sbatch.j2",
            folder=str(folder),
            wait_s=NODE_WAIT_S,
            no_canary=EXIT_NO_CANARY,
            no_python=EXIT_NO_PYTHON,
            pythonpath=os.environ.get("PYTHONPATH", ""),
            python=sys.executable,
        )
        atomic_write(script, os.fsencode(text))
        job_id = client.submit(
            _options(partition, num_nodes, cluster or ClusterConfig(), client.memory_rules(partition)), script
        )
        return _collect(client, folder, job_id, timeout_s)
    finally:
        if job_id:
            with suppress(SlurmError):  # it ends by its own time limit of a minute
                client.cancel(job_id)
        shutil.rmtree(folder, ignore_errors=True)


def _options(partition: str | None, num_nodes: int, cluster: ClusterConfig, rules: MemoryRules) -> list[str]:
    cpus = rules.cpus(1, _MEM_MB)
    memory = cluster.memory_option(mem_mb=_MEM_MB, cpus=cpus, rules=rules)
    return [
        "--job-name=rl-doctor",
        f"--nodes={num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        *(f"--{name}={amount}" for name, amount in memory.items()),
        "--time=1",
        "--output=/dev/null",  # a folder that the node does not see would fail the job without a word
        "--chdir=/",
        "--no-requeue",
        *([f"--partition={partition}"] if partition else []),
    ]


def _collect(client: SlurmClient, folder: Path, job_id: str, timeout_s: float) -> ProbeOutcome:
    outcome = ProbeOutcome()
    started_at, looked_at = time.monotonic(), float("-inf")
    while time.monotonic() - started_at < timeout_s:
        _read_answers(folder, outcome)
        if outcome.answers and not outcome.waited_s:
            outcome.waited_s = time.monotonic() - started_at
        if outcome.login_offset_s is None and not outcome.login_error and is_there(folder / FIRST_PORT):
            _connect(folder, outcome)
        if time.monotonic() - looked_at >= _QUEUE_INTERVAL_S:
            looked_at = time.monotonic()
            if _look_at_job(client, job_id, outcome):
                break
        time.sleep(_POLL_INTERVAL_S)
    time.sleep(_POLL_INTERVAL_S)
    _read_answers(folder, outcome)
    outcome.waited_s = outcome.waited_s or time.monotonic() - started_at
    for path in sorted(folder.glob("node-*.log")):
        outcome.logs[int(path.stem.rpartition("-")[2])] = path.read_text(errors="replace")[-2000:]
    return outcome


def _look_at_job(client: SlurmClient, job_id: str, outcome: ProbeOutcome) -> bool:
    """Whether the job has ended."""
    try:
        facts = client.job(job_id)
    except SlurmError:
        return False
    if facts is None:
        return True
    job = job_of_scontrol(facts)
    outcome.state, outcome.reason = job.word, job.reason
    if job.phase is not JobPhase.WAITING:
        outcome.num_nodes = job.num_nodes or outcome.num_nodes
    if job.phase is not JobPhase.ENDED:
        return job.is_blocked
    code = facts.get("ExitCode", "").partition(":")[0]
    outcome.exit_code = int(code) if code.isdecimal() else None
    return True


def _read_answers(folder: Path, outcome: ProbeOutcome) -> None:
    for path in folder.glob("answer-*.json"):
        said = json.loads(path.read_bytes())
        outcome.answers[int(said["rank"])] = said


def _connect(folder: Path, outcome: ProbeOutcome) -> None:
    """From here to the port of the first node."""
    try:
        outcome.login_offset_s = exchange(folder)
    except (OSError, ValueError) as error:
        outcome.login_error = str(error)
    atomic_write(folder / "login-reached", b"")
