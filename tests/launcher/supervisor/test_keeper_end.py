"""A supervisor that is killed after it has recorded the end: nothing starts again, and nothing else is said."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corral.experiments.trial.attempts import AttemptEnd, Follows, read_end
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.files import patience
from corral.launcher.supervisor import keeper
from corral.launcher.supervisor.keeper import keep
from tests.launcher.conftest import MakeTrial
from tests.launcher.trials import StubTrial, wait_until

SUPERVISOR = """
import os, signal, sys
from pathlib import Path
from corral.experiments.trial.attempts import AttemptEnd, EndState, write_end
from corral.experiments.trial.directory import TrialDirectory

directory, then = TrialDirectory(Path(sys.argv[1])), sys.argv[2]
with (directory.path / "starts").open("a") as file:
    file.write("started ")
write_end(directory, AttemptEnd(attempt=0, state=EndState.REQUEUED, cause="asked for", then=then))
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("then", ["requeue", ""])
def test_an_attempt_that_has_recorded_its_end_is_not_started_again(tmp_path: Path, then: Follows) -> None:
    trial = StubTrial(tmp_path, {}, model_workers=1, servers=0)
    trial.prepare()
    command = [sys.executable, "-c", SUPERVISOR, str(trial.directory.path), then]
    assert keep(trial.directory, command=command, max_restarts=3) == 0
    assert (trial.directory.path / "starts").read_text() == "started "
    end = read_end(trial.directory, 0)
    assert end is not None and (end.state, end.cause, end.then) == ("REQUEUED", "asked for", then)
    assert trial.events("attempt_ended", then="") == trial.events("task_ended", who="supervisor") == []
    assert trial.directory.secrets_path.exists() is bool(then)


def test_files_that_fail_when_a_supervisor_has_died_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = StubTrial(tmp_path, {}, model_workers=1, servers=0)
    trial.prepare()
    faults = [errno.EIO, errno.ESTALE]

    def refused(directory: TrialDirectory, attempt: int) -> AttemptEnd | None:
        if faults:
            raise OSError(faults.pop(), "a fault")
        return read_end(directory, attempt)

    monkeypatch.setattr(keeper, "read_end", refused)
    monkeypatch.setattr(patience, "_PAUSE_S", 0.0)
    command = [sys.executable, "-c", SUPERVISOR, str(trial.directory.path), "requeue"]
    assert keep(trial.directory, command=command, max_restarts=3) == 0
    assert (trial.directory.path / "starts").read_text() == "started " and faults == []


@pytest.mark.parametrize("behaviour", ["finish 0.2 3", "exit 2"])
def test_a_supervisor_that_is_killed_once_the_end_is_recorded_leaves_the_rest_to_its_keeper(
    make_trial: MakeTrial, behaviour: str
) -> None:
    trial = make_trial({"master_worker/0": [behaviour]})
    trial.start()
    (started,) = trial.wait_for("supervisor_started")
    wait_until(lambda: read_end(trial.directory, 0), "the end to be recorded")
    with contextlib.suppress(ProcessLookupError):  # it was faster
        os.kill(started["pid"], signal.SIGKILL)
    has_failed = behaviour == "exit 2"
    assert trial.wait() == has_failed
    end = read_end(trial.directory, 0)
    assert end is not None and end.state == ("FAILED" if has_failed else "COMPLETE")
    assert not trial.directory.secrets_path.exists() and len(trial.events("supervisor_started")) == 1
    assert bool(trial.events("page_failed")) is not has_failed  # tried where there is a step; stubs have no graph
    assert trial.processes() == []


def test_a_supervisor_whose_predecessor_has_removed_the_secrets_ends_a_trial_that_is_done(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial({"master_worker/0": ["finish 0.2"]})
    trial.prepare()
    TrialLog(trial.directory.log_path).claim("job").done()
    TrialSecrets.destroy(trial.directory.secrets_path)
    done = subprocess.run(trial.command(), timeout=120, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert trial.ended()["state"] == "COMPLETE" and not trial.directory.secrets_path.exists()
