"""A file system that refuses or hangs while a trial runs: the trial goes on, and tells later what it could not tell."""

import errno
import os
import signal

import pytest

from corral.experiments.trial.directory import StopRequest
from corral.launcher.logs.failures import describe_failures
from corral.launcher.trial.lock import is_locked
from corral.launcher.trial.view import TrialView
from tests.launcher.conftest import MakeTrial
from tests.launcher.supervisor.broken_files import break_files, mend_files
from tests.launcher.trials import StubTrial, wait_until

WORKER = "gserver_manager/0"


def test_a_disk_that_is_full_or_lost_for_a_while_ends_nothing_and_is_told_later(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["master"]}, model_workers=1, servers=0)
    trial.start()
    trial.wait_for_workers()
    errors = ("ENOSPC", "ESTALE")
    for number, error in enumerate(errors, start=1):
        break_files(trial.directory, error, "events.jsonl", "log/", "control/stop.json")
        kill(trial, WORKER)
        wait_until(lambda number=number: len(trial.starts(WORKER)) > number, f"a restart in spite of {error}")
        assert len(trial.events("task_ended", who=WORKER)) < number
        mend_files(trial.directory)
        (late,) = trial.wait_for("records_late", count=number)[number - 1 :]
        assert late["late"] >= 2 and late["dropped"] == 0 and os.strerror(_number_of(error)) in late["cause"]
    ends = trial.wait_for("task_ended", who=WORKER, count=len(errors))
    assert [end["code"] for end in ends] == [-9] * len(errors)
    assert len(trial.events("supervisor_started")) == 1 and trial.directory.secrets_path.exists()
    stop(trial)
    assert trial.wait() == 0
    assert trial.ended()["state"] == "STOPPED" and trial.processes() == []


def test_a_trial_whose_files_fail_while_it_starts_begins_when_they_are_there_again(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["wait"]}, model_workers=1, servers=0)
    troubles = (
        ("ESTALE", "control/", "lock the trial"),
        ("EDQUOT", "control/supervisor.lock", "lock the trial"),
        ("EIO", "plan.json", "read the plan"),
        ("EIO", "control/claim-0.json", "read the last attempt"),
    )
    break_files(trial.directory, *troubles[0][:2])
    keeper, said = trial.start(), trial.directory.path / "supervisor.out"
    for error, path, step in troubles:
        break_files(trial.directory, error, path)  # in place of the trouble before it
        words = f"to {step}: [Errno {_number_of(error)}]"
        wait_until(lambda words=words: words in said.read_text() or keeper.poll() is not None, words)
        assert keeper.poll() is None and trial.events() == [], said.read_text()
    mend_files(trial.directory)
    trial.wait_for_workers()
    stop(trial, grace_s=0.1)  # its master commits nothing
    assert trial.wait() == 0
    assert trial.ended()["state"] == "STOPPED" and len(trial.events("supervisor_started")) == 1


def test_a_signal_ends_a_keeper_that_waits_for_its_files(make_trial: MakeTrial) -> None:
    trial = make_trial({}, model_workers=1, servers=0)
    break_files(trial.directory, "EIO", "plan.json")
    keeper = trial.start()
    said = trial.directory.path / "supervisor.out"
    wait_until(lambda: "waiting for the files" in said.read_text() or keeper.poll() is not None, "what the keeper does")
    assert keeper.poll() is None
    keeper.send_signal(signal.SIGTERM)
    assert trial.wait() == 1
    assert not is_locked(trial.directory) and trial.events() == []


def test_a_disk_that_stays_full_lets_a_trial_that_is_stopped_end_and_leaves_nothing(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["wait"]}, model_workers=1, servers=0)
    trial.shorten({"supervisor._REPORT_TIMEOUT_S": 0.5})
    trial.start()
    trial.wait_for_workers()
    stop(trial, grace_s=0.1)
    break_files(trial.directory, "ENOSPC", "events.jsonl", "log/.")
    assert trial.wait() == 0
    assert trial.processes() == [] and not is_locked(trial.directory)


def test_a_supervisor_that_breaks_or_is_killed_is_replaced_and_its_workers_with_it(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["master"]}, model_workers=1, servers=0)
    trial.start()
    trial.wait_for_workers()
    before = set(trial.processes())
    break_files(trial.directory, "RuntimeError", "log/")
    (failed,) = trial.wait_for("supervisor_failed")
    mend_files(trial.directory)
    assert failed["cause"] == "RuntimeError: a fault"
    trial.wait_for("supervisor_started", count=2)
    wait_until(lambda: len(trial.starts("master_worker/0")) == 2, "the master's second start")
    assert not before & set(trial.processes())
    before = {event["pid"] for event in trial.events("worker_started") + trial.events("redis_started")}
    os.kill(trial.events("supervisor_started")[-1]["pid"], signal.SIGKILL)
    trial.wait_for("supervisor_started", count=3)
    assert not before & set(trial.processes())
    wait_until(lambda: len(trial.starts("master_worker/0")) == 3, "the master's third start")
    assert trial.events("attempt_ended") == [] and trial.directory.secrets_path.exists()
    stop(trial)
    assert trial.wait() == 0 and trial.processes() == []
    assert describe_failures(TrialView.open(trial.directory), trial.directory, attempt=None).startswith(
        "newest failure: supervisor, SIGKILL"
    )


def test_a_file_that_hangs_stops_neither_restarts_nor_signals(make_trial: MakeTrial) -> None:
    short = {"stop_grace_s": 0.1}  # its master commits nothing
    trial = make_trial({"master_worker/0": ["wait"]}, model_workers=1, servers=0, supervision=short)
    supervisor = trial.start()
    trial.wait_for_workers()
    os.mkfifo(trial.directory.log_path / "00000001")  # whoever opens it waits for a writer
    kill(trial, WORKER)
    wait_until(lambda: len(trial.starts(WORKER)) == 2, "the worker's second start")
    supervisor.send_signal(signal.SIGTERM)
    assert trial.wait() == 0
    assert trial.processes() == []


@pytest.mark.parametrize("victims", [["keeper"], ["supervisor", "keeper"]])
def test_whatever_ends_keeper_and_supervisor_ends_all_that_they_started(
    make_trial: MakeTrial, victims: list[str]
) -> None:
    trial = make_trial({"master_worker/0": ["stubborn"]}, model_workers=1, servers=0)
    keeper = trial.start()
    trial.wait_for_workers()
    pid_by_name = {"keeper": keeper.pid, "supervisor": trial.events("supervisor_started")[0]["pid"]}
    for victim in victims:
        os.kill(pid_by_name[victim], signal.SIGKILL)
    wait_until(lambda: not trial.processes() and not is_locked(trial.directory), "the end of all processes")
    assert trial.events("attempt_ended", then="") == []


def test_a_supervisor_whose_trial_goes_on_elsewhere_ends_what_it_started_and_decides_nothing(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial({"master_worker/0": ["stubborn"]}, model_workers=1, servers=0)
    trial.start()
    trial.wait_for_workers()
    (trial.directory.control_path / "claim-1.json").write_text('{"job_id": "8", "restart_count": 0}')
    assert trial.wait() == 1
    assert trial.processes() == []
    assert trial.events("attempt_ended", then="") == [] and trial.directory.secrets_path.exists()
    assert len(trial.events("supervisor_started")) == 1


def kill(trial: StubTrial, worker: str) -> None:
    os.kill(trial.starts(worker)[-1][0], signal.SIGKILL)


def stop(trial: StubTrial, *, grace_s: float = 10.0) -> None:
    trial.directory.write_stop_request(StopRequest(requested_at=0.0, by="me@here", now=False, grace_s=grace_s))


def _number_of(error: str) -> int:
    return int(getattr(errno, error))
