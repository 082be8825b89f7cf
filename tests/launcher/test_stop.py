"""rl-stop of a trial that waits: the answer is how it ended, not how it stood a moment before."""

from pathlib import Path
from typing import Any

import pytest

from corral.experiments.trial_log import TrialLog
from corral.launcher import stop
from corral.launcher.slurm import QueuedJob, SlurmClient
from corral.launcher.status import TrialStatus
from corral.launcher.trials import read_facts
from tests.launcher.trials import StubTrial


class FakeSlurm(SlurmClient):
    """An empty queue that notes what is cancelled."""

    cancelled: tuple[str, ...] = ()

    def queue(self) -> list[QueuedJob]:
        return []

    def cancel(self, job_or_step: str, *, signal_name: str | None = None) -> None:
        self.cancelled += (job_or_step,)


def test_a_stop_between_two_attempts_waits_until_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = StubTrial(tmp_path, {}, mode="slurm")
    trial.prepare()
    facts = read_facts(trial.directory)
    assert facts is not None
    # SLURM shows the attempt before it as completing for some seconds, so that its successor seems to start.
    words = iter(["QUEUED", "STARTING", "STARTING", "STOPPED"])

    class Reader:
        def __init__(self, *_: Any) -> None:
            pass

        def read(self, _: Any) -> list[TrialStatus]:
            return [status(next(words))]

    def status(word: str) -> TrialStatus:
        return TrialStatus(
            experiment="exp", trial="trial", directory=str(trial.directory.path), mode="slurm", state=word,
            step=None, total_steps=3, age_s=None, nodes=None, job_id="7", attempt=1, note="", workers=(),
        )  # fmt: skip

    monkeypatch.setattr(stop, "StatusReader", Reader)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    client = FakeSlurm()
    assert stop.stop_trial(facts, client=client).state == "STOPPED"
    assert client.cancelled == ("7",)
    found = TrialLog(trial.directory.log_path).read().stop
    assert found is not None and found.reason == "rl-stop"
