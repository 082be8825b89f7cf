"""One submission, one job: whatever sbatch says, does not say, or is kept from saying."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.plan import TrialIdentity
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.slurm.client import (
    SlurmClient,
    SlurmError,
    SlurmUncertainError,
    SlurmUnreachableError,
    SubmissionUnknownError,
    patiently,
)
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.job_queue import is_head_of, submit_once
from corral.launcher.slurm.own_jobs import OwnJobs
from corral.launcher.slurm.verdict import Job
from corral.launcher.trial.lock import SubmissionRunsError, submitting
from tests.launcher.jobs import job_of

SCRIPT = Path("trial.sbatch")

UUID = "0123456789abcdef" * 2


def job(
    job_id: str, *, state: str = "PENDING", uuid: str = UUID, allocation: str = "head", display_id: str = ""
) -> Job:
    tag = {"corral": 1, "trial_uuid": uuid, "directory": "/t", "allocation": allocation}
    return job_of(job_id, state, tag=tag, display_id=display_id)


class FakeSlurm(SlurmClient):
    """Takes the job, or does not, and answers as it is told."""

    def __init__(self, answer: Callable[[], str], queue: Sequence[Job] | SlurmError = ()) -> None:
        super().__init__()
        self._answer = answer
        self._queue = queue
        self.cancelled: list[str] = []

    def submit(self, options: Sequence[str], script: Path) -> str:
        return self._answer()

    def queue(self) -> list[Job]:
        if isinstance(self._queue, SlurmError):
            raise self._queue
        return list(self._queue)

    def cancel(self, job_or_step: str, *, signal_name: str | None = None) -> None:
        self.cancelled.append(job_or_step)


def failing(error: BaseException) -> Callable[[], str]:
    def answer() -> str:
        raise error

    return answer


def submit(client: SlurmClient) -> str:
    directory = TrialDirectory(Path("/nowhere"))
    cluster = SlurmCluster(client)
    identity = TrialIdentity(experiment="exp", trial="trial", uuid=UUID, directory=directory.path)
    is_it = is_head_of(OwnJobs(directory, identity))
    return submit_once(cluster, lambda: cluster.submit_trial(directory), is_it=is_it)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def test_a_job_that_was_taken_without_an_answer_is_found_and_not_asked_for_again() -> None:
    others = [job("5", uuid="v"), job("6", state="CANCELLED"), job("7", allocation="model_worker")]
    others += [job("8", display_id="8+0"), job("9", display_id="8+1")]
    assert submit(FakeSlurm(failing(SlurmUncertainError("timed out")), others)) == "8"


def test_a_job_that_was_not_taken_leaves_the_error_of_sbatch() -> None:
    with pytest.raises(SlurmUncertainError, match="timed out"):
        submit(FakeSlurm(failing(SlurmUncertainError("timed out"))))


def test_what_a_refusal_says_is_believed() -> None:
    with pytest.raises(SlurmError, match="no such partition"):
        submit(FakeSlurm(failing(SlurmError("no such partition")), [job("8")]))


def test_a_controller_that_says_nothing_at_all_leaves_the_question_open() -> None:
    with pytest.raises(SubmissionUnknownError, match="nobody can say .* timed out; then away"):
        submit(FakeSlurm(failing(SlurmUncertainError("timed out")), SlurmUnreachableError("away")))


def test_an_interrupted_submission_takes_back_what_was_taken() -> None:
    client = FakeSlurm(failing(KeyboardInterrupt()), [job("7", uuid="v"), job("8")])
    with pytest.raises(KeyboardInterrupt):
        submit(client)
    assert client.cancelled == ["8"]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("sleep 9", SlurmUncertainError),
        ("echo 'Socket timed out on send/recv operation' >&2; exit 1", SlurmUncertainError),
        ("echo Welcome to our site", SlurmUncertainError),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", SlurmUnreachableError),
        ("echo 'Invalid account' >&2; exit 1", SlurmError),
    ],
)
def test_only_an_answer_that_leaves_it_open_is_uncertain(
    script: str, error: type[SlurmError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SlurmError) as raised:
        SlurmClient(timeout_s=1.0).submit([], SCRIPT)
    assert type(raised.value) is error


def test_of_two_that_submit_a_trial_at_once_one_goes_on(tmp_path: Path) -> None:
    directory = TrialDirectory(tmp_path / "trial")
    directory.create()
    with submitting(directory), pytest.raises(SubmissionRunsError, match="is at work"), submitting(directory):
        pass
    with submitting(directory):
        pass


def test_a_question_waits_for_a_controller_that_is_away_but_not_for_one_that_refuses() -> None:
    answers: list[Any] = [SlurmUnreachableError("away"), SlurmUnreachableError("away"), "n1"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert patiently(ask, "an address") == "n1"
    answers += [SlurmError("no such node"), "n1"]
    with pytest.raises(SlurmError, match="no such node"):
        patiently(ask, "an address")
    answers[:] = [SlurmUnreachableError("away")] * 3
    with pytest.raises(SlurmUnreachableError):
        patiently(ask, "an address", patience_s=-1.0)
