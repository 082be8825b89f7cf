"""Which jobs are a trial's: by the comment of corral, or by id and name where a site has rewritten it."""

from pathlib import Path
from typing import Any

import pytest

from corral.experiments.plan import TrialIdentity
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.slurm.own_jobs import JobIndex, JobNote, OwnJobs
from corral.launcher.slurm.verdict import Job
from corral.launcher.status.evidence import find_jobs
from tests.launcher.jobs import job_of

UUID = "0123456789abcdef" * 2


def job(job_id: str, *, name: str = "exp.trial", state: str = "RUNNING", **tag: Any) -> Job:
    if tag:
        return job_of(job_id, state, name=name, tag={"corral": 1} | tag)
    return job_of(job_id, state, name=name, comment="billed to project 7")


@pytest.fixture
def own(tmp_path: Path) -> OwnJobs:
    directory = TrialDirectory(tmp_path / "exp" / "trial")
    directory.create()
    identity = TrialIdentity(experiment="exp", trial="trial", uuid=UUID, directory=directory.path)
    return OwnJobs(directory, identity)


def again(own: OwnJobs, **changes: Any) -> OwnJobs:
    """As another process sees it."""
    return OwnJobs(own.directory, own.whose, **changes)


def test_a_comment_of_corral_decides_alone(own: OwnJobs) -> None:
    own.note("7", attempt=0)
    assert own.identify(job("8", trial_uuid=UUID, allocation="a", attempt=2)) == JobNote(
        name="exp.trial", allocation="a", attempt=2
    )
    assert own.identify(job("7", trial_uuid="another")) is None


def test_without_a_comment_id_and_name_decide_together(own: OwnJobs) -> None:
    own.note("7", attempt=0)
    own.note("9", allocation="rollout_worker/2", attempt=1)
    for seen in (own, again(own)):
        assert seen.identify(job("7")) == JobNote(name="exp.trial", allocation="head", attempt=0)
        extra_job = seen.identify(job("9", name="exp.trial.rollout_worker-2"))
        assert extra_job is not None and (extra_job.allocation, extra_job.attempt) == ("rollout_worker/2", 1)
        # Job 7 of another cluster that shares the home folder, and a namesake in another folder.
        assert seen.identify(job("7", name="exp.other")) is None
        assert seen.identify(job("8")) is None


def test_the_job_that_claimed_the_last_attempt_is_the_head_even_if_nobody_noted_it(own: OwnJobs) -> None:
    claimed = again(own, claimed_by="7")
    note = claimed.identify(job("7"))
    assert note is not None and note.allocation == "head"
    assert claimed.identify(job("7", name="exp.other")) is None and claimed.identify(job("8")) is None


def test_jobs_are_sorted_out_by_comment_and_by_note(own: OwnJobs) -> None:
    for job_id, allocation in (("7", "head"), ("8", "head"), ("9", "a")):
        own.note(job_id, allocation=allocation, attempt=0)
    jobs = [
        job("7", state="COMPLETED"),
        job("8", state="PENDING"),
        job("9", name="exp.trial.a"),
        job("10", trial_uuid=UUID, allocation="b"),
        job("11", trial_uuid="another"),
        job("12", name="somebody"),
    ]
    found = find_jobs(JobIndex.of(jobs), own, job_id="7", is_over=True)
    assert found.head is not None and found.head.job_id == "8"
    assert {name: one.job_id for name, one in found.extra_jobs.items()} == {"a": "9", "b": "10"}
    assert found.zombies == ()
