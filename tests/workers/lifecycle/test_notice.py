"""SIGTERM in a step of SLURM: the master passes it on, everybody goes on, and SIGINT ends them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corral.experiments.trial.directory import StopRequest
from corral.workers.lifecycle.worker import request_last_commit
from tests.launcher.trials import StubTrial, wait_until

WORKER = """
import asyncio, signal, sys, threading
from pathlib import Path
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.workers.lifecycle.worker import notice_of
from corral.workers.lifecycle.worker import StopRequested, install_signal_handlers, run_async

directory, kind = TrialDirectory(Path(sys.argv[1])), sys.argv[2]
stopping = threading.Event()

async def work():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: print("works on", flush=True))
    print("works", flush=True)
    while True:
        await asyncio.sleep(600.0)

try:
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    install_signal_handlers(stopping, notice=notice_of(plan.mode, directory, kind, stop_grace_s=1.0))
    run_async(work(), stopping)
except StopRequested:
    print("leaves")
"""

LEAVING = """
stopping.set()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.raise_signal(number)
print("cleans up", flush=True)
"""


@pytest.mark.parametrize(
    ("mode", "kind", "is_told"),
    [("slurm", "master_worker", True), ("slurm", "model_worker", False), ("local", "master_worker", False)],
)
def test_only_where_slurm_sends_it_by_itself_sigterm_is_a_notice(
    tmp_path: Path, mode: str, kind: str, is_told: bool
) -> None:
    trial = StubTrial(tmp_path, {}, mode=mode, model_workers=1, servers=0)
    command = [sys.executable, "-c", WORKER, str(trial.directory.path), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "works\n"
        worker.send_signal(signal.SIGTERM)
        if mode == "slurm":
            if is_told:
                request = wait_until(trial.directory.read_stop_request, "the request")
                assert (request.then, request.is_notice) == ("requeue", True)
            worker.send_signal(signal.SIGUSR1)
            assert worker.stdout.readline() == "works on\n"
            worker.send_signal(signal.SIGINT)
        assert worker.communicate(timeout=20)[0] == "leaves\n"
    assert worker.returncode == 0
    assert (trial.directory.read_stop_request() is not None) is is_told


def test_who_asks_a_worker_to_leave_that_has_ended_its_work_does_not_kill_it(tmp_path: Path) -> None:
    """The supervisor asks everybody once the master has said that all is done, which is then about to leave."""
    trial = StubTrial(tmp_path, {}, mode="local", model_workers=1, servers=0)
    ending = WORKER.replace('print("works", flush=True)', "return") + LEAVING
    command = [sys.executable, "-c", ending, str(trial.directory.path), "master_worker"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "cleans up\n"), ended.stderr


def test_a_notice_does_not_take_the_place_of_what_somebody_asked_for(tmp_path: Path) -> None:
    trial = StubTrial(tmp_path, {}, mode="slurm", model_workers=1, servers=0)
    final = StopRequest(requested_at=0.0, by="me@here", now=True, grace_s=5.0)
    trial.directory.write_stop_request(final)
    request_last_commit(trial.directory, stop_grace_s=5.0)
    assert trial.directory.read_stop_request() == final
    assert not list(trial.directory.control_path.glob(".*"))
