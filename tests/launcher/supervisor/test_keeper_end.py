"""A supervisor that is killed after it has recorded the end: nothing starts again, and nothing else is said."""

import errno
import sys
from pathlib import Path

import pytest

from corral.experiments.trial.attempt_end_record import AttemptEndRecord, Follows, read_end
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.files import patience
from corral.launcher.supervisor import keeper
from corral.launcher.supervisor.keeper import keep
from tests.launcher.trials import StubTrial

SUPERVISOR = """
import os, signal, sys
from pathlib import Path
from corral.experiments.trial.attempt_end_record import AttemptEndRecord, write_end
from corral.experiments.trial.directory import TrialDirectory

directory, then = TrialDirectory(Path(sys.argv[1])), sys.argv[2]
with (directory.path / "starts").open("a") as file:
    file.write("started ")
write_end(directory, AttemptEndRecord(attempt=0, state="REQUEUED", cause="asked for", then=then))
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("then", ["requeue", ""])
def test_an_attempt_that_has_recorded_its_end_is_not_started_again(tmp_path: Path, then: Follows) -> None:
    trial = StubTrial(tmp_path, {}, model_workers=1, servers=0)
    trial.prepare()
    command = [sys.executable, "-c", SUPERVISOR, str(trial.directory.path), then]
    assert keep(trial.directory, command=command, max_restarts=3) == 0
    assert (trial.directory.path / "starts").read_text() == "started "
    assert read_end(trial.directory, 0) == AttemptEndRecord(attempt=0, state="REQUEUED", cause="asked for", then=then)
    assert trial.events("trial_ended") == trial.events("supervisor_died") == []
    assert trial.directory.secrets_path.exists() is bool(then)


def test_files_that_fail_when_a_supervisor_has_died_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = StubTrial(tmp_path, {}, model_workers=1, servers=0)
    trial.prepare()
    faults = [errno.EIO, errno.ESTALE]

    def refused(directory: TrialDirectory, attempt: int) -> AttemptEndRecord | None:
        if faults:
            raise OSError(faults.pop(), "a fault")
        return read_end(directory, attempt)

    monkeypatch.setattr(keeper, "read_end", refused)
    monkeypatch.setattr(patience, "_PAUSE_S", 0.0)
    command = [sys.executable, "-c", SUPERVISOR, str(trial.directory.path), "requeue"]
    assert keep(trial.directory, command=command, max_restarts=3) == 0
    assert (trial.directory.path / "starts").read_text() == "started " and faults == []
