"""The keeper: how often it starts a supervisor again, and what is left when it does so no more."""

import sys

import pytest

from corral.experiments.trial.attempts import begin_attempt
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import CorruptLogError
from corral.launcher.files.patience import PATIENCE_S
from corral.launcher.status.reader import StatusReader
from corral.launcher.supervisor import keeper
from corral.launcher.supervisor.keeper import keep
from corral.launcher.supervisor.signs_of_life import START_S
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE
from corral.launcher.trial.view import read_facts
from tests.launcher.conftest import MakeTrial


def test_a_supervisor_that_is_killed_too_often_leaves_nothing_running_and_no_secrets(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_GUARDS_END_S", 0.1)
    trial = make_trial({}, model_workers=1, servers=0)
    trial.prepare()
    orphan = f"""
import os, subprocess
environment = os.environ | {{"{TRIAL_UUID_VARIABLE}": "{trial.plan.trial.uuid}"}}
subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
os.kill(os.getpid(), 9)
"""
    assert keep(trial.directory, command=[sys.executable, "-c", orphan], max_restarts=1) == 1
    assert trial.processes() == []
    assert not trial.directory.secrets_path.exists()
    assert [event["code"] for event in trial.events("task_ended", who="supervisor")] == [-9, -9]
    assert trial.ended()["state"] == "FAILED"


def test_a_trial_that_its_supervisor_cannot_begin_says_why(make_trial: MakeTrial) -> None:
    trial = make_trial({}, model_workers=1, servers=0)
    trial.prepare()
    begin_attempt(trial.directory, job_id="another-host:1:1", restart_count=0, mode="local")
    TrialLog(trial.directory.log_path).claim("x")
    for path in trial.directory.log_path.iterdir():
        path.write_bytes(b"nonsense")
    with pytest.raises(CorruptLogError):
        keep(trial.directory, command=[sys.executable], max_restarts=1)
    facts = read_facts(trial.directory)
    assert facts is not None
    (status,) = StatusReader().read([facts])
    assert status.state == "FAILED" and f"the next attempt: {trial.directory.log_path}" in status.note


def test_a_supervisor_has_longer_to_start_than_it_waits_for_the_cluster() -> None:
    waits = ("the address of its node", "the end of earlier steps")
    assert START_S > len(waits) * PATIENCE_S
