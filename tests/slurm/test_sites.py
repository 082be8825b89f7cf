"""What sites do to jobs: comments that are rewritten, users who may have one job only. Trials go on all the same."""

from collections.abc import Iterator
from typing import Any

import pytest

from corral.experiments.trial.attempts import read_attempts, read_end
from corral.experiments.trial.directory import StopRequest
from corral.launcher.slurm.client import SlurmClient
from tests.launcher.trials import wait_until
from tests.slurm.cluster import Cluster, running_cluster
from tests.slurm.trials import SlurmTrial

pytestmark = pytest.mark.slurm

REWRITES_COMMENTS = """\
function slurm_job_submit(job, partitions, uid)
    job.comment = "billed to project 7"
    return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
    return slurm.SUCCESS
end
"""
GROWS_OLD = {"master_worker/0": ["steps 100000 0.2", "steps 1 0"]}
REQUEUE = StopRequest(requested_at=0.0, by="me@here", now=False, grace_s=10.0, then="requeue")


@pytest.fixture
def rewriting_cluster() -> Iterator[Cluster]:
    with running_cluster(num_nodes=3, job_submit=REWRITES_COMMENTS) as cluster:
        yield cluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The one that a test names."""
    cluster: Cluster = request.getfixturevalue(request.param)
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    return cluster


@pytest.mark.parametrize("cluster", ["rewriting_cluster"], indirect=True)
def test_where_comments_are_rewritten_a_trial_knows_its_jobs_by_id_and_name(make_slurm_trial: Any) -> None:
    trial: SlurmTrial = make_slurm_trial(GROWS_OLD, model_workers=1, servers=1, gpu=8, launch={"layout": "jobs"})
    first = trial.submit()
    wait_until(lambda: trial.starts("master_worker/0"), "the master")
    assert all(job.line.endswith("|billed to project 7") for job in SlurmClient().queue())
    assert trial.status().job_id == first
    trial.directory.write_stop_request(REQUEUE)
    (successor,) = trial.wait_for("successor_submitted")
    assert trial.wait_for_state("QUEUED", "STARTING", "RUNNING", "COMPLETE").state != "LOST"
    trial.wait_for("attempt_ended", then="", state="COMPLETE")
    assert [record.attempt for record in read_attempts(trial.directory)] == [0, 1]
    assert trial.status().job_id == successor["job_id"]
    # Each attempt has asked for each of its two jobs once.
    asked = [(event["attempt"], event["allocation"]) for event in trial.events("extra_job_submitted")]
    assert sorted(asked) == [(n, kind) for n in (0, 1) for kind in ("generation_server", "model_worker")]
    wait_until(lambda: not alive(), "an empty queue")


@pytest.mark.parametrize("cluster", ["accounting_cluster"], indirect=True)
def test_where_one_job_is_the_limit_a_trial_is_requeued_and_goes_on(make_slurm_trial: Any) -> None:
    trial: SlurmTrial = make_slurm_trial(GROWS_OLD, model_workers=1, servers=0, launch={"qos": "one-job"})
    job_id = trial.submit()
    wait_until(lambda: trial.starts("master_worker/0"), "the master")
    trial.directory.write_stop_request(REQUEUE)
    (refused, *_) = trial.wait_for("successor_refused")
    assert "QOSMaxSubmitJobPerUserLimit" in refused["cause"]
    trial.wait_for("requeued")
    end = wait_until(lambda: read_end(trial.directory, 0), "the end of the first attempt")
    assert (end.state, end.then) == ("REQUEUED", "requeue")
    status = trial.wait_for_state("QUEUED", "REQUEUED", "STARTING", "RUNNING", "COMPLETE")
    assert "scancel" not in status.note
    ended = wait_until(lambda: trial.events("attempt_ended", then=""), f"the end of {trial.events()}", timeout_s=150.0)
    assert [event["state"] for event in ended] == ["COMPLETE"], trial.events()
    assert [event["state"] for event in trial.events("attempt_ended")] == ["REQUEUED", "COMPLETE"]
    assert not trial.events("task_ended", who="supervisor")
    assert {event["job_id"] for event in trial.events("submitted")} == {job_id}


def alive() -> list[str]:
    """Jobs that wait or run."""
    return [job.job_id for job in SlurmClient().queue() if job.is_active]
