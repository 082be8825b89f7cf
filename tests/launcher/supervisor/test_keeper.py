"""The keeper: how often it starts a supervisor again, and what is left when it does so no more."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from corral.launcher.supervisor.keeper import RestartBudget, keep
from corral.launcher.supervisor.units import RestartPolicy
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE
from tests.launcher.conftest import MakeTrial

POLICY = RestartPolicy(max_restarts=3, pause_s=0.2, healthy_after_s=100.0)


@given(lives=st.lists(st.floats(0.0, 200.0), min_size=1, max_size=30))
def test_the_budget_of_restarts_is_spent_by_short_lives_in_a_row_and_healed_by_a_long_one(lives: list[float]) -> None:
    budget, short_lives = RestartBudget(POLICY), 0
    for lived_s in lives:
        short_lives = 1 if lived_s >= POLICY.healthy_after_s else short_lives + 1
        pause_s = budget.ended(lived_s)
        if short_lives > POLICY.max_restarts:
            assert pause_s is None
            return
        assert pause_s == POLICY.pause_before(short_lives)


def test_a_supervisor_that_is_killed_too_often_leaves_nothing_running_and_no_secrets(make_trial: MakeTrial) -> None:
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
    assert [event["returncode"] for event in trial.events("supervisor_died")] == [-9, -9]
    assert trial.ended()["state"] == "FAILED"
