"""rl-status against a real SLURM: why a trial waits, what is left of it when SLURM forgets, is down, or knows more."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.trial.attempts import AttemptEnd, EndState, record_attempt, write_end
from corral.experiments.trial.journal import Journal
from corral.launcher.commands.stop import cancel_orphan, find_job, is_orphan
from corral.launcher.files.file_thread import PatientFiles
from corral.launcher.slurm.client import SlurmClient
from corral.launcher.slurm.job_queue import CachedQueue, SlurmQueue
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.reader import StatusReader
from tests.launcher.trials import wait_until
from tests.slurm.cluster import Cluster, running_cluster
from tests.slurm.trials import SlurmTrial

pytestmark = pytest.mark.slurm
BIN = Path(sys.executable).parent
PURGE_TIMEOUT_S = 150.0  # SLURM looks for old jobs once a minute


def submit_stand_in(trial: SlurmTrial, *options: str, attempt: int = 0, script: str = "sleep 60") -> str:
    """A job that carries the trial's tag and does nothing: what SLURM says about it is what matters here."""
    if not (trial.directory.control_path / f"attempt-{attempt}.json").exists():
        record_attempt(trial.directory, attempt=attempt, resume=attempt > 0, mode="slurm")
    tag = {
        "corral": 1,
        "trial_uuid": trial.plan.trial.uuid,
        "directory": str(trial.directory.path),
        "allocation": "head",
    }
    path = trial.directory.path / "stand-in.sbatch"
    path.write_text(f"#!/bin/sh\n{script}\n")
    defaults = [f"--output={trial.directory.logs_path}/slurm-%j.log", f"--comment={json.dumps(tag)}", "--mem=64M"]
    trial.job_id = SlurmClient().submit([*defaults, *options], path)
    Journal(trial.directory.journal_path).append("submitted", attempt=attempt, job_id=trial.job_id)
    return trial.job_id


def note_until(trial: SlurmTrial, words: str) -> TrialStatus:
    """The status, as soon as its note holds these words."""

    def look() -> TrialStatus | None:
        status = trial.status()
        return status if words in status.note else None

    return wait_until(look, f"a note with {words!r}, last {trial.status()}")


@pytest.mark.parametrize(
    ("options", "state", "words"),
    [
        (["--begin=now+1hour"], "QUEUED", "BeginTime: not eligible before its begin time, est. start 20"),
        (["--hold"], "HELD", "JobHeldUser: held by you; scontrol release"),
        (["--dependency=after:{other}"], "QUEUED", "Dependency: waits for another job"),
        (["--partition=short", "--nodes=3"], "BLOCKED", "PartitionNodeLimit"),
        (["--partition=short", "--time=10"], "BLOCKED", "PartitionTimeLimit"),
        (["--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=8"], "QUEUED", "Resources: waits for resources"),
    ],
    ids=["begin", "held", "dependency", "nodes", "time", "resources"],
)
def test_a_trial_that_waits_says_why(
    options: list[str], state: str, words: str, make_slurm_trial: Any, cluster: Cluster
) -> None:
    other = make_slurm_trial({}, trial="other")
    submit_stand_in(other, *([] if state == "QUEUED" and "--nodes=4" in options else ["--begin=now+1hour"]))
    if "--nodes=4" in options:
        other.wait_for_state("STARTING", "RUNNING", "DEGRADED")
    trial = make_slurm_trial({})
    submit_stand_in(trial, *[option.format(other=other.job_id) for option in options])
    status = note_until(trial, words)
    assert status.state == state, status
    assert status.job_id == trial.job_id


def test_a_trial_whose_nodes_are_drained_is_blocked(make_slurm_trial: Any, cluster: Cluster) -> None:
    cluster.run("scontrol", "update", "nodename=n4", "state=drain", "reason=test")
    try:
        trial = make_slurm_trial({})
        submit_stand_in(trial, "--nodelist=n4")
        status = note_until(trial, "are down; sinfo -R says why")
        assert status.state == "BLOCKED"
    finally:
        cluster.run("scontrol", "update", "nodename=n4", "state=resume")


def test_a_job_that_slurm_put_back_says_when_it_may_start(make_slurm_trial: Any, cluster: Cluster) -> None:
    trial = make_slurm_trial({})
    submit_stand_in(trial, "--requeue")
    trial.wait_for_state("STARTING", "DEGRADED")
    Journal(trial.directory.journal_path).append("supervisor_started", attempt=0, pid=1, node="n1")
    cluster.run("scontrol", "requeue", trial.job_id)
    status = note_until(trial, "eligible at 20")
    assert status.state == "REQUEUED"
    assert f"attempt 1 waits in job {trial.job_id}" in status.note


def test_a_missing_log_folder_is_named(make_slurm_trial: Any) -> None:
    trial = make_slurm_trial({})
    trial.directory.path.mkdir(parents=True, exist_ok=True)
    no_folder = trial.directory.path / "nowhere"  # a file: newer SLURM makes folders that are missing
    no_folder.touch()
    submit_stand_in(trial, f"--output={no_folder}/%j.log")
    assert "folder" in note_until(trial, "folder").note
    assert trial.status().state == "FAILED"


def test_a_job_of_an_earlier_attempt_is_a_note_and_not_this_attempts(make_slurm_trial: Any, cluster: Cluster) -> None:
    trial = make_slurm_trial({})
    old = submit_stand_in(trial, "--begin=now+1hour")
    new = submit_stand_in(trial, "--hold", attempt=1)
    try:
        status = note_until(trial, f"job {old} of an earlier attempt is still PENDING; scancel {old}")
        assert (status.state, status.job_id, status.attempt) == ("HELD", new, 1)
    finally:
        cluster.run("scancel", old)


def test_a_trial_whose_directory_is_gone_is_listed_from_its_jobs_comment_and_can_be_ended(
    make_slurm_trial: Any, tmp_path: Path, cluster: Cluster
) -> None:
    trial = make_slurm_trial({})
    job_id = submit_stand_in(trial, "--begin=now+1hour")
    shutil.rmtree(trial.directory.path)
    listed = run("rl-status", "-o", "json", tmp_path=tmp_path)
    (status,) = json.loads(listed.stdout)
    assert (status["trial"], status["state"], status["job_id"]) == ("trial", "QUEUED", job_id)
    assert f"directory missing: {trial.directory.path}" in status["note"]
    named = run("rl-status", "exp/trial", tmp_path=tmp_path)
    assert named.returncode == 0 and f"directory missing: {trial.directory.path}" in named.stdout, named.stderr
    ended = run("rl-stop", "exp/trial", tmp_path=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"ended job {job_id}" in ended.stdout
    wait_until(
        lambda: (job := find_job(job_id, SlurmQueue(), tmp_path)) is None or not job.is_active, "the end of the job"
    )
    trial.directory.path.mkdir(parents=True)  # what clears up after the test looks at it


def test_a_job_that_slurm_has_forgotten_is_lost_and_an_unreachable_cluster_is_unknown(
    make_slurm_trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_slurm_trial({})
    trial.prepare()
    assert trial.status().state == "LOST"
    monkeypatch.setenv("PATH", "/nowhere")
    status = trial.status()
    assert status.state == "UNKNOWN" and "squeue" in status.note


def test_all_jobs_of_a_lost_trial_are_ended_together(make_slurm_trial: Any) -> None:
    trial = make_slurm_trial({})
    jobs = [submit_stand_in(trial, "--hold"), submit_stand_in(trial, "--hold", attempt=1)]
    shutil.rmtree(trial.directory.path)
    orphan = find_job(jobs[1], SlurmQueue(), trial.directory.path)
    assert orphan is not None and is_orphan(orphan, now=False, files=PatientFiles())
    assert sorted(cancel_orphan(orphan, SlurmQueue())) == sorted(jobs)
    trial.directory.path.mkdir(parents=True)


def test_a_job_id_names_a_trial(make_slurm_trial: Any, tmp_path: Path) -> None:
    trial = make_slurm_trial({})
    job_id = submit_stand_in(trial, "--hold")
    ended = run("rl-stop", job_id, tmp_path=tmp_path / "elsewhere")
    assert ended.returncode == 0, ended.stderr
    assert "exp/trial STOPPED" in ended.stdout


def test_the_facts_behind_a_word_are_squeues_own_line(make_slurm_trial: Any, tmp_path: Path) -> None:
    trial = make_slurm_trial({})
    submit_stand_in(trial, "--hold")
    shown = run("rl-status", "trial", "--explain", tmp_path=tmp_path).stdout
    assert "why HELD: JobHeldUser" in shown and "$ squeue -h -t all" in shown
    assert f"{trial.job_id}|{trial.job_id}|PENDING|JobHeldUser|" in shown


@pytest.fixture
def own_cluster(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> Iterator[Cluster]:
    """One that may be broken; `cluster` only says whether there is SLURM."""
    with running_cluster(num_nodes=1) as broken:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, broken.environment[name])
        yield broken


@pytest.mark.slow
def test_a_forgotten_job_is_told_by_our_records_else_lost_and_a_controller_that_is_down_by_the_last_answer(
    own_cluster: Cluster, tmp_path: Path
) -> None:
    own_cluster.update_config(MinJobAge=2)
    finished, silent, waiting = (SlurmTrial(tmp_path, {}, mode="slurm", trial=name) for name in ("a", "b", "c"))
    submit_stand_in(finished, script="true")
    write_end(finished.directory, AttemptEnd(attempt=0, state=EndState.COMPLETE, cause="", then=""))
    submit_stand_in(silent, script="true")
    submit_stand_in(waiting, "--hold")
    before = silent.wait_for_state("FAILED")
    assert "without finishing" in before.note

    cluster = SlurmQueue()
    ids = (finished.job_id, silent.job_id)
    wait_until(lambda: all(cluster.job(one) is None for one in ids), "SLURM to forget", timeout_s=PURGE_TIMEOUT_S)
    assert finished.status().state == "COMPLETE"
    lost = silent.status()
    assert lost.state == "LOST" and "--resume" in lost.note

    queue = CachedQueue(cluster, path=tmp_path / "queue.json")
    assert StatusReader(cluster, queue=queue).read([waiting.facts])[0].state == "HELD"
    own_cluster.stop_controller()
    wait_until(lambda: queue.look().unreachable_since, "the cache to be old")
    (unreachable,) = StatusReader(cluster, queue=queue).read([waiting.facts])
    assert unreachable.state == "HELD" and "cluster unreachable since" in unreachable.note
    started = time.monotonic()
    StatusReader(cluster, queue=queue).read([waiting.facts])
    print(f"while the controller is down, a second look takes {time.monotonic() - started:.3f} s")
    assert finished.status().state == "COMPLETE"


def run(command: str, *arguments: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    tmp_path.mkdir(exist_ok=True)
    environment = {"CORRAL_FILEROOT": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "200"}
    return subprocess.run(
        [str(BIN / command), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
