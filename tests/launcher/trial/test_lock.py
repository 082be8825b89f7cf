"""The supervisor's lock, with locks of files and without: who is refused, who waits, and where a claim decides."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.experiments.trial.attempts import begin_attempt, last_attempt, read_claim, record_attempt
from corral.launcher.supervisor.keeper import keep
from corral.launcher.supervisor.signs_of_life import SupervisorExit
from corral.launcher.trial.lock import SupervisorRunsError, is_locked, lock_path, lock_supervisor
from corral.launcher.trial.processes import describe_this_process, process_start_ticks
from tests.launcher.trials import StubTrial

ELSEWHERE = {"host": "another-node", "pid": 1, "start_ticks": 1}


@pytest.fixture
def trial(tmp_path: Path) -> StubTrial:
    """Attempt 0 runs, or ran, in job 7 on another node."""
    trial = StubTrial(tmp_path, {}, mode="slurm", model_workers=1, servers=0)
    trial.prepare()
    begin_attempt(trial.directory, job_id="7", restart_count=0, mode="slurm")
    lock_path(trial.directory).write_text(json.dumps(ELSEWHERE))
    return trial


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre mounted without `flock`."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)


def start_job(trial: StubTrial, monkeypatch: pytest.MonkeyPatch, job_id: str, *, restarts: int = 0) -> int:
    """What the batch step of a job does, with a supervisor that ends at once."""
    monkeypatch.setattr("corral.launcher.supervisor.keeper._LEAVING_S", 0.1)
    monkeypatch.setenv("SLURM_JOB_ID", job_id)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setenv("PATH", "")  # nobody says anything about job 7
    ends = [sys.executable, "-c", f"raise SystemExit({SupervisorExit.ENDED})"]
    return keep(trial.directory, command=ends, max_restarts=0)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize(("job_id", "restarts"), [("8", 0), ("7", 1)])
def test_without_locks_the_next_job_goes_on_whatever_the_file_of_a_gone_node_says(
    trial: StubTrial, monkeypatch: pytest.MonkeyPatch, job_id: str, restarts: int
) -> None:
    assert start_job(trial, monkeypatch, job_id, restarts=restarts) == 0
    attempt = last_attempt(trial.directory)
    assert attempt is not None and attempt.attempt == 1
    claim = read_claim(trial.directory, 1)
    assert claim is not None and claim.is_of(job_id, restarts)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_second_supervisor_of_the_same_start_is_refused(
    trial: StubTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SupervisorRunsError, match=r"process 1 on another-node.*if that host is gone, delete "):
        start_job(trial, monkeypatch, "7")


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_living_process_of_this_host_is_waited_for_and_then_refused(
    trial: StubTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = describe_this_process() | {"pid": os.getppid(), "start_ticks": process_start_ticks(os.getppid())}
    lock_path(trial.directory).write_text(json.dumps(parent))
    assert is_locked(trial.directory)
    with pytest.raises(SupervisorRunsError, match=f"process {os.getppid()} on "):
        start_job(trial, monkeypatch, "8")


@pytest.mark.parametrize("has_locks", [True, False])
def test_who_could_not_write_his_name_down_is_not_refused_by_himself(
    trial: StubTrial, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, has_locks: bool
) -> None:
    lock_path(trial.directory).unlink()
    if not has_locks:
        request.getfixturevalue("no_locks")

    def refused(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            lock_supervisor(trial.directory)
    os.close(lock_supervisor(trial.directory))


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_local_trial_of_another_host_is_not_started_here(tmp_path: Path) -> None:
    trial = StubTrial(tmp_path, {}, model_workers=1, servers=0)
    record_attempt(trial.directory, attempt=0, resume=False, mode="local")
    lock_path(trial.directory).write_text(json.dumps(ELSEWHERE))
    with pytest.raises(SupervisorRunsError, match="another-node"):
        keep(trial.directory, command=[sys.executable, "-c", "pass"], max_restarts=0)


@pytest.fixture
def other_process(trial: StubTrial) -> Iterator[None]:
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(lock_path(trial.directory))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate(timeout=120)


@pytest.mark.usefixtures("other_process")
def test_with_locks_the_lock_decides_and_no_claim(trial: StubTrial) -> None:
    assert is_locked(trial.directory)
    with pytest.raises(SupervisorRunsError, match="runs already"):
        lock_supervisor(trial.directory, patience_s=0.1, claim_decides=True)
