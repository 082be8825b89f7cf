"""Processes of a trial on this host: found by ownership, killed, and no orphan of a parent that died."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from corral.launcher.trial import processes
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE, Leftovers, kill_trial_processes, process_start_ticks
from tests.launcher.trials import wait_until


def sleeper(trial_uuid: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(["sleep", "600"], env=os.environ | {TRIAL_UUID_VARIABLE: trial_uuid})
    wait_until(lambda: process.pid in processes.trial_processes(trial_uuid), "its environment")
    return process


def test_a_process_that_does_not_die_is_told_and_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    trial_uuid = uuid.uuid4().hex
    with sleeper(trial_uuid) as process:
        with monkeypatch.context() as patched:  # one that waits for a dead disk cannot be made here
            patched.setattr(signal, "pidfd_send_signal", lambda *_: None)
            patched.setattr(os, "kill", lambda *_: None)
            found = kill_trial_processes(trial_uuid, timeout_s=0.1)
        assert found == Leftovers(killed=(process.pid,), left=(process.pid,))
        assert process.poll() is None
        assert kill_trial_processes(trial_uuid) == Leftovers(killed=(process.pid,), left=())


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_only_what_carries_the_trials_id_is_killed(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
    def not_here(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", not_here)
    trial_uuid, other = uuid.uuid4().hex, uuid.uuid4().hex
    with sleeper(trial_uuid) as ours, sleeper(other) as theirs:
        # The id of a process that has ended, as if it had been given to another one since the look.
        monkeypatch.setattr(processes, "trial_processes", lambda *_, **__: iter((theirs.pid,)))
        assert kill_trial_processes(trial_uuid, timeout_s=0.1).killed == ()
        monkeypatch.undo()
        assert theirs.poll() is None
        assert kill_trial_processes(trial_uuid).killed == (ours.pid,)
        theirs.kill()


def test_a_worker_ends_with_a_parent_that_dies_before_it_has_begun(tmp_path: Path) -> None:
    supervisor = f"""
import os
from pathlib import Path
from corral.launcher.runners.runner import LocalRunner
runner, log_path = LocalRunner(bind_address="auto", gpus_by_worker={{}}), Path("{tmp_path}/log")
task = runner.start("master_worker/0", ("sleep", "600"), environment={{}}, log_path=log_path)
print(task.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    run = subprocess.run([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True, timeout=60)
    wait_until(lambda: process_start_ticks(int(run.stdout)) is None, "the worker's end")
