"""The supervisor with real processes and a real Redis: what dies is restarted, what ends is ended, nothing is left."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.attempts import read_ends
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.launcher.files.file_thread import FileThread
from corral.launcher.status.reader import StatusReader
from corral.launcher.supervisor.supervisor import TrialWatch
from corral.launcher.trial.ends import ends_of
from corral.launcher.trial.lock import is_locked
from corral.launcher.trial.view import read_facts
from tests.launcher.conftest import MakeTrial
from tests.launcher.trials import StubTrial, wait_until

FEW: dict[str, Any] = {"model_workers": 1, "servers": 0}
"""For what is not about trainer groups and servers: each worker is two processes to start."""
TRACKERS = """\
import sys


def refuses(folder, trial):
    sys.exit(2)


class Fails:
    def __init__(self, folder, trial):
        raise ValueError("no key")


class Notes:
    def __init__(self, folder, trial):
        self.folder = folder.parent

    def add(self, step, time_s, values):
        pass

    def flush(self):
        (self.folder / "flushed").touch()

    def close(self):
        (self.folder / "closed").touch()
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubTrial]:
    """A trial that runs, for tests that only look at it. The shell that submits it has a limit of its own."""
    env_vars = {"env_vars": {"MY_SETTING": "a b"}}
    trial = StubTrial(tmp_path_factory.mktemp("running"), {"master_worker/0": ["master"]}, task=env_vars, **FEW)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, hard))
    try:
        trial.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    trial.wait_for_workers()
    yield trial
    trial.close()


def test_no_process_of_a_trial_keeps_the_soft_limits_of_the_shell_that_submitted(running: StubTrial) -> None:
    limits = {pid: Path(f"/proc/{pid}/limits").read_text() for pid in running.processes()}
    assert len(limits) >= 5  # keeper, supervisor, Redis, and at least a guard and a worker
    assert not [pid for pid, text in limits.items() if re.search(r"Max file size +1099511627776 ", text)]


def test_workers_know_the_bind_address_and_no_secret(running: StubTrial) -> None:
    pid = running.starts("model_worker/0")[0][0]
    with open(f"/proc/{pid}/environ", "rb") as file:
        environment = file.read().decode().split("\0")
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read().decode()
    assert {"CORRAL_BIND_ADDRESS=127.0.0.1", "OMP_NUM_THREADS=1", "MY_SETTING=a b", "CUDA_VISIBLE_DEVICES="} <= {
        *environment
    }
    secret = json.loads((running.directory.secrets_path / "secrets.json").read_text())["redis_password"]
    assert secret not in command and not any(secret in entry for entry in environment)


def test_a_second_supervisor_of_a_trial_is_refused(running: StubTrial) -> None:
    second = subprocess.run(running.command(), capture_output=True, text=True, timeout=120)
    assert running.supervisor is not None and second.returncode == 2
    assert str(running.supervisor.pid) in second.stderr and "rl-stop" in second.stderr
    assert len(running.events("supervisor_started")) == 1


def test_a_trial_that_is_done_ends_complete_and_leaves_nothing(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["finish 0.2"], "gserver_manager/0": ["child"]})
    assert trial.run() == 0
    assert trial.ended()["state"] == "COMPLETE"
    assert trial.processes() == []
    assert not trial.directory.secrets_path.exists()
    assert not is_locked(trial.directory)
    assert (trial.directory.logs_path / "latest" / "master_worker-0.log").read_text().startswith("master_worker/0")
    assert {event["worker"] for event in trial.events("worker_started")} == {
        f"{worker.kind}/{worker.index}" for worker in trial.plan.workers
    }


def test_what_ends_is_restarted_with_its_unit_and_with_its_end_on_record(make_trial: MakeTrial) -> None:
    trial = make_trial(
        {
            "master_worker/0": ["exit 0", "master"],
            "model_worker/1": ["die 1 model_worker/0", "wait"],
            "generation_server/0": ["exit 3", "kill", "wait"],
        }
    )
    trial.start()
    for worker, count in (("generation_server/0", 3), ("model_worker/0", 2), ("master_worker/0", 2)):
        trial.wait_for("worker_started", worker=worker, count=count)
        wait_until(lambda w=worker, n=count: len(trial.starts(w)) == n, f"{count} starts of {worker}")
    wait_until(lambda: len(trial.starts("model_worker/1")) == 2, "the second start of the other rank")
    _stop(trial)
    assert trial.wait() == 0
    assert len(trial.starts("gserver_manager/0")) == 1
    first, second = zip(trial.starts("model_worker/0"), trial.starts("model_worker/1"), strict=True)
    assert first[0][1] == first[1][1] != second[0][1] == second[1][1], (
        "the ranks of a trainer group share an incarnation"
    )
    causes = {event["unit"]: event["cause"] for event in reversed(trial.events("unit_restarting"))}
    assert set(causes) == {"master_worker/0", "model_worker", "generation_server/0"}
    assert "before the trial was done" in causes["master_worker/0"]
    crash, kill, *_ = ends_of(trial.events("task_ended", who="generation_server/0"))
    assert (crash.why, kill.why) == ("exit 3", "SIGKILL") and crash.charged and kill.charged
    peer, dead = (ends_of(trial.events("task_ended", who=f"model_worker/{rank}"))[0] for rank in (0, 1))
    assert dead.charged and not peer.charged and peer.caused_by == f"{dead.who} {dead.why}"
    assert "ValueError: told to exit with 3" in crash.last_lines(trial.directory, 20)
    assert "kill" in kill.last_lines(trial.directory, 20)[-1]


def test_what_no_restart_would_help_fails_the_trial_at_once_with_the_workers_last_word(make_trial: MakeTrial) -> None:
    cause = "KeyError: 'solution' (own.py:3)"
    trial = make_trial({"master_worker/0": ["master"], "model_worker/0": [f"exit {WorkerExit.USER_CODE:d}"]}, **FEW)
    trial.directory.last_word_path("model_worker/0").write_text(cause)
    assert trial.run() == 1
    assert cause in trial.ended()["cause"]
    assert len(trial.starts("model_worker/0")) == 1
    facts = read_facts(trial.directory)
    assert facts is not None
    (status,) = StatusReader().read([facts])
    assert cause in status.note


def test_a_redis_that_is_killed_or_frozen_is_replaced_on_its_port_while_the_workers_go_on(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial({"master_worker/0": ["master"]}, **FEW)
    trial.shorten({"silence.LOOK_INTERVAL_S": 0.2, "silence._TIMEOUT_S": 0.2})
    trial.start()
    trial.wait_for_workers()
    (first,) = trial.wait_for("redis_started")
    os.kill(first["pid"], signal.SIGKILL)
    second = trial.wait_for("redis_started", count=2)[1]
    address = json.loads(trial.directory.rendezvous_path.read_bytes())
    assert address == {"host": "127.0.0.1", "port": first["port"]}
    assert [end["code"] for end in trial.events("task_ended", who="redis")] == [-9]
    os.kill(second["pid"], signal.SIGSTOP)
    third = trial.wait_for("redis_started", count=3)[2]
    assert trial.events("redis_frozen")[0]["pid"] == second["pid"] and third["port"] == first["port"]
    assert len(trial.starts("model_worker/0")) == 1


def test_a_tracker_that_never_works_is_given_up_and_named_and_the_trial_goes_on(make_trial: MakeTrial) -> None:
    broken, works = "own_tracker:refuses", "own_tracker:Notes"
    trial = make_trial(
        {"master_worker/0": ["master 3"]}, tracking=(broken, works), supervision={"max_restarts": 1}, **FEW
    )
    trial.directory.code_path.mkdir()
    (trial.directory.code_path / "own_tracker.py").write_text(TRACKERS)
    trial.start()
    (given_up,) = trial.wait_for("unit_given_up")
    assert given_up["unit"] == "tracker/0" and "exit 2" in given_up["cause"]
    wait_until((trial.directory.path / "tracking" / "flushed").exists, "the other tracker to be at work")
    facts = read_facts(trial.directory)
    assert facts is not None
    (status,) = StatusReader().read([facts])
    assert f"nothing goes to {broken} any more" in status.note and works not in status.note
    assert [one for one in trial.events("task_ended") if not one["who"].startswith("tracker/")] == []
    _stop(trial)
    assert trial.wait() == 0
    assert trial.ended()["state"] == "STOPPED" and (trial.directory.path / "tracking" / "closed").exists()
    assert trial.processes() == []


def test_a_tracker_that_fails_is_named_with_its_error_long_before_it_is_given_up(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["master"]}, tracking=("own_tracker:Fails",), **FEW)
    trial.directory.code_path.mkdir()
    (trial.directory.code_path / "own_tracker.py").write_text(TRACKERS)
    trial.start()
    told = "exit 1 (ValueError: no key (own_tracker.py:10))"
    wait_until(lambda: len(trial.events("task_ended")) > 1, "the tracker to fail twice")
    facts = read_facts(trial.directory)
    assert facts is not None
    (status,) = StatusReader().read([facts])
    assert not trial.events("unit_given_up")
    (trouble,) = status.troubles
    assert trouble.startswith("tracker own_tracker:Fails failed, restart ") and f": {told}; see rl-logs " in trouble
    assert trouble in status.note
    _stop(trial)
    assert trial.wait() == 0
    (status,) = StatusReader().read([facts])
    assert status.state == "STOPPED" and "ValueError: no key (own_tracker.py:10)" in status.troubles[0]


def test_a_trial_whose_folder_is_removed_ends_its_processes(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["master"]}, **FEW)
    trial.start()
    wait_until(lambda: len(trial.starts("model_worker/0")) == 1, "a worker")
    trial.directory.path.rename(gone := trial.directory.path.with_name("gone"))
    shutil.rmtree(gone)
    wait_until(lambda: not trial.processes(), "its processes to end")


def test_a_folder_that_is_moved_is_not_taken_for_one_that_is_removed(tmp_path: Path) -> None:
    directory = TrialDirectory(tmp_path / "exp" / "trial")
    directory.create()
    watch = TrialWatch(FileThread("looks"), directory, TrialLog(directory.log_path), attempt=0)

    def why_over() -> str:
        found, _ = watch.look(time.monotonic(), is_awaited=True)
        return found[-1].why_over

    assert why_over() == ""
    moved = directory.path.rename(tmp_path / "moved")
    assert why_over() == ""
    shutil.rmtree(moved)
    assert why_over() == f"{directory.path} was removed"


def test_a_stop_request_lets_the_master_checkpoint_and_a_resume_goes_on_as_the_next_attempt(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial({"master_worker/0": ["master", "finish 0.1"]}, **FEW)
    trial.start()
    trial.wait_for_workers()
    _stop(trial)
    assert trial.wait() == 0
    assert trial.ended()["state"] == "STOPPED" and trial.processes() == []
    state = TrialLog(trial.directory.log_path).read()
    assert state.stop is not None and state.stop.reason == "checkpointed at step 3"
    trial.directory.clear_stop_request()
    trial.start(attempt=1, resume=True)
    assert trial.wait() == 0
    assert {number: end.state for number, end in read_ends(trial.directory).items()} == {0: "STOPPED", 1: "COMPLETE"}
    assert (trial.directory.logs_path / "latest").resolve().name == "attempt-1"


def test_a_stop_request_and_a_signal_that_come_together_are_both_heard(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["master"]}, **FEW)
    trial.start()
    trial.wait_for_workers()
    supervisor = trial.events("supervisor_started")[0]["pid"]
    os.kill(supervisor, signal.SIGSTOP)  # so that it finds both at once
    _stop(trial)
    os.kill(supervisor, signal.SIGUSR2)
    os.kill(supervisor, signal.SIGCONT)
    assert trial.wait() == 0
    assert [event["by"].split(":")[0] for event in trial.events("stop_requested")] == ["me@here", "SIGUSR2"]
    state = TrialLog(trial.directory.log_path).read()
    assert state.stop is not None and state.stop.epoch == 1, "the master has answered"


def test_a_master_that_does_not_answer_is_stopped_after_the_grace_period(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["wait"]}, **FEW)
    trial.start()
    trial.wait_for_workers()
    _stop(trial, grace_s=0.2)
    assert trial.wait() == 0
    assert "grace period" in trial.ended()["cause"]
    stop = TrialLog(trial.directory.log_path).read().stop
    assert stop is not None and stop.epoch is None


def test_stop_now_does_not_wait_for_stubborn_workers(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["stubborn"], "model_worker/0": ["stubborn"]})
    trial.start()
    trial.wait_for_workers()
    _stop(trial, now=True, grace_s=600.0)
    assert trial.wait() == 0
    assert trial.ended()["state"] == "STOPPED"
    assert trial.processes() == []


def _stop(trial: StubTrial, *, now: bool = False, grace_s: float = 10.0) -> None:
    trial.directory.write_stop_request(StopRequest(requested_at=0.0, by="me@here", now=now, grace_s=grace_s))
