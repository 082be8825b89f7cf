"""How an attempt begins where files fail for a moment: with the same files in the end, whichever of them failed."""

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.trial.attempts import (
    AttemptRecord,
    begin_attempt,
    last_attempt,
    read_claim,
    read_end,
)
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.files import patience
from corral.launcher.files.patience import FilePatience
from corral.launcher.supervisor.keeper import open_attempt
from tests.launcher.trials import StubTrial


class OneFault:
    """Lets the n-th file of a trial that is opened fail, once."""

    def __init__(self, directory: TrialDirectory, number: int, error: int) -> None:
        self._prefix = f"{directory.path}/"
        self._error = error
        self.opens_left = number

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and str(path).startswith(self._prefix):
                self.opens_left -= 1
                if self.opens_left == 0:
                    raise OSError(self._error, os.strerror(self._error), str(path))
            return function(path, *arguments, **options)

        return call


def open_with_fault(directory: TrialDirectory, number: int, error: int) -> tuple[AttemptRecord | None, bool]:
    """The attempt, and whether there was a file to fail."""
    fault = OneFault(directory, number, error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience, "_PAUSE_S", 0.0)
        patch.setattr(os, "open", fault.guarded(os.open))
        guarded_open = fault.guarded(io.open)
        patch.setattr(io, "open", guarded_open)
        patch.setattr(builtins, "open", guarded_open)
        return open_attempt(directory), fault.opens_left <= 0


def make_followed(root: Path, *, then: Any) -> TrialDirectory:
    """Attempt 0 has run elsewhere and ended without a word; somebody has asked for something meanwhile."""
    trial = StubTrial(root, {}, model_workers=1, servers=0)
    trial.prepare()
    begin_attempt(trial.directory, job_id="another-host:1:1", restart_count=0, mode="local")
    request = StopRequest(requested_at=0.0, by="me@here", now=False, grace_s=5.0, then=then)
    trial.directory.write_stop_request(request)
    return trial.directory


def test_whichever_file_fails_the_next_attempt_begins_once_and_with_all_that_it_needs(tmp_path: Path) -> None:
    number, is_hit = 0, True
    while is_hit:
        number += 1
        directory = make_followed(tmp_path / str(number), then="requeue")
        old = TrialSecrets.load(directory.secrets_path).redis_password
        record, is_hit = open_with_fault(directory, number, (errno.ENOSPC, errno.EIO)[number % 2])
        assert record is not None and record == last_attempt(directory) and record.attempt == 1
        assert read_claim(directory, 2) is None
        end = read_end(directory, 0)
        assert end is not None
        assert (end.state, end.cause, end.then) == ("LOST", "it ended without a word", "requeue")
        assert TrialSecrets.load(directory.secrets_path).redis_password != old
        assert directory.read_stop_request() is None and directory.attempt_logs(1).is_dir()
        assert list(directory.control_path.glob(".*.tmp")) == []
    assert number > 20


def test_whichever_file_fails_a_trial_that_somebody_ended_meanwhile_does_not_go_on(tmp_path: Path) -> None:
    number, is_hit = 0, True
    while is_hit:
        number += 1
        directory = make_followed(tmp_path / str(number), then="")
        record, is_hit = open_with_fault(directory, number, (errno.ENOSPC, errno.EIO)[number % 2])
        end = read_end(directory, 0)
        assert record is None and end is not None and (end.state, end.is_final) == ("STOPPED", True)
        assert TrialLog(directory.log_path).read().is_stopped and not directory.secrets_path.exists()
    assert number > 20


@pytest.mark.parametrize(("error", "is_unwanted"), [(errno.EACCES, False), (errno.EIO, True)])
def test_what_fails_for_good_or_is_wanted_by_nobody_any_more_is_not_tried_again(error: int, is_unwanted: bool) -> None:
    tries = []

    def work() -> None:
        tries.append("one")
        raise OSError(error, os.strerror(error))

    with pytest.raises(OSError, match=os.strerror(error)):
        FilePatience(lambda: is_unwanted).insist("try", work)
    assert tries == ["one"]
