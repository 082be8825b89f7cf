"""Whatever ends a job on a real SLURM: the trial goes on by itself where it should, else says what a human can do."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from corral.experiments.trial.attempts import read_attempts
from corral.experiments.trial.directory import StopRequest
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import Stop
from corral.launcher.slurm.client import SlurmClient
from corral.launcher.trial.lock import lock_path, read_lock
from tests.launcher.trials import wait_until
from tests.slurm.cluster import Cluster, missing_programs, running_cluster
from tests.slurm.trials import SlurmTrial

pytestmark = pytest.mark.slurm

ENDLESS = "steps 100000 0.2"
END_AT_ONCE = "steps 1 0"
GROWS_OLD = {"master_worker/0": [ENDLESS, END_AT_ONCE]}
ONE_NODE: dict[str, Any] = {"model_workers": 1, "servers": 0}
THREE_NODES: dict[str, Any] = {"task": {"cpu": 3}, "model_workers": 2}


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """A cluster of their own: these tests break nodes and stop the controller."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"SLURM is not installed: no {', '.join(missing)}")
    with running_cluster() as cluster:
        yield cluster


def test_a_crashed_node_ends_the_attempt_and_the_next_one_completes_elsewhere(
    make_slurm_trial: Any, cluster: Cluster
) -> None:
    trial = make_slurm_trial(GROWS_OLD, **THREE_NODES)
    job_id = trial.submit()
    trial.wait_for_commits()
    node = next(event["node"] for event in reversed(trial.events("worker_started")) if event["node"] != head_of(trial))
    crash(cluster, node)
    try:
        trial.wait_for_end()
    finally:
        cluster.start_node(node)
    assert [end["state"] for end in ends_of(trial)] == ["NODE_FAILED", "COMPLETE"], trial.events()
    assert trial.directory.failed_nodes() == [node]
    assert node not in {event["node"] for event in trial.events("worker_started", attempt=1)}
    assert [event["job_id"] for event in trial.events("submitted")] == [job_id, job_id]  # SLURM itself requeued it
    trial.wait_for_empty_queue()


def test_a_crash_of_the_supervisors_own_node_is_survived_too(make_slurm_trial: Any, cluster: Cluster) -> None:
    trial = make_slurm_trial(GROWS_OLD, **THREE_NODES)
    trial.submit()
    trial.wait_for_commits()
    node = head_of(trial)
    crash(cluster, node)
    try:
        trial.wait_for_end()
    finally:
        cluster.start_node(node)
    assert [end["state"] for end in ends_of(trial)] == ["NODE_FAILED", "COMPLETE"], trial.events()
    assert trial.directory.failed_nodes() == [node]


def test_a_trial_is_put_back_before_its_first_commit_and_later_from_a_drained_node_that_disturbed_nobody(
    make_slurm_trial: Any, cluster: Cluster
) -> None:
    trial = make_slurm_trial({"master_worker/0": ["master", ENDLESS, END_AT_ONCE]}, **ONE_NODE)
    job_id = trial.submit()
    wait_until(lambda: trial.starts("master_worker/0"), "the master")
    cluster.run("scontrol", "requeue", job_id)
    trial.wait_for_commits()
    node = head_of(trial)
    cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    try:
        before = trial.num_commits
        wait_until(lambda: trial.num_commits >= before + 3, "three more commits on a draining node")
        assert [end["state"] for end in ends_of(trial)] == ["REQUEUED"]
        cluster.run("scontrol", "requeue", job_id)
        trial.wait_for_end()
        assert head_of(trial) != node
        assert [end["state"] for end in ends_of(trial)] == ["REQUEUED", "REQUEUED", "COMPLETE"], trial.events()
        assert [record.is_automatic for record in read_attempts(trial.directory)] == [False, True, True]
    finally:
        cluster.run("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_preempted_trial_commits_in_the_grace_period_and_goes_on(make_slurm_trial: Any, cluster: Cluster) -> None:
    trial = make_slurm_trial(GROWS_OLD, **ONE_NODE, launch={"partition": "spot"})
    trial.submit()
    trial.wait_for_workers()
    trial.wait_for_commits()
    take_all_nodes(cluster)
    trial.wait_for_end()
    assert [end["state"] for end in ends_of(trial)] == ["PREEMPTED", "COMPLETE"], trial.events()
    # Steps got SIGTERM at its beginning, and no exit was a crash: all stayed until the master had committed.
    assert trial.events("unit_restarting") == []
    assert len(trial.starts("master_worker/0")) == 2
    (stopped,) = [entry for _, entry in TrialLog(trial.directory.log_path).poll() if isinstance(entry, Stop)]
    assert stopped.epoch == 1 and stopped.then == "requeue"  # by the master itself


def test_scancel_from_outside_is_final(make_slurm_trial: Any, cluster: Cluster) -> None:
    trial = make_slurm_trial(GROWS_OLD, **ONE_NODE)
    job_id = trial.submit()
    trial.wait_for_commits()
    cluster.run("scancel", job_id)
    trial.wait_for_end("CANCELLED")
    assert [job.job_id for job in trial.jobs] == [job_id]
    trial.wait_for_empty_queue()
    assert len(read_attempts(trial.directory)) == 1


def test_scancel_during_the_hand_over_takes_the_successor_along(make_slurm_trial: Any, cluster: Cluster) -> None:
    trial = make_slurm_trial({"master_worker/0": ["stubborn"]}, **ONE_NODE, supervision={"stop_grace_s": 60.0})
    job_id = trial.submit()
    wait_until(lambda: trial.starts("master_worker/0"), "the master")
    cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    (successor,) = trial.wait_for("successor_submitted")
    cluster.run("scancel", job_id)
    trial.wait_for_end("CANCELLED")
    trial.wait_for_empty_queue()
    assert str(successor["job_id"]) in {job.job_id for job in trial.jobs}
    assert len(read_attempts(trial.directory)) == 1


def test_a_stop_after_the_hand_over_began_wins(make_slurm_trial: Any) -> None:
    trial = make_slurm_trial({"master_worker/0": ["stubborn"]}, **ONE_NODE)
    trial.submit()
    wait_until(lambda: trial.starts("master_worker/0"), "the master")
    trial.directory.write_stop_request(
        StopRequest(requested_at=0.0, by="me@here", now=False, grace_s=60.0, then="requeue")
    )
    trial.wait_for("successor_submitted")
    trial.directory.write_stop_request(StopRequest(requested_at=1.0, by="me@here", now=True, grace_s=60.0))
    trial.wait_for_end("STOPPED")
    trial.wait_for_empty_queue()
    assert not TrialLog(trial.directory.log_path).read().is_handed_over


def test_the_time_limit_without_a_warning_still_leads_to_a_successor(make_slurm_trial: Any, cluster: Cluster) -> None:
    trial = make_slurm_trial({"master_worker/0": [ENDLESS]}, **ONE_NODE, launch={"time_limit": "5"})
    job_id = trial.submit()
    trial.wait_for_commits()
    cluster.run("scontrol", "update", f"jobid={job_id}", "TimeLimit=0:01")
    wait_until(lambda: ends_of(trial), "the time limit")
    trial.behave({"master_worker/0": [END_AT_ONCE]})
    trial.wait_for_end()
    first = ends_of(trial)[0]
    assert (first["state"], first["then"]) == ("TIMED_OUT", "successor"), first


def test_nothing_of_a_trial_outlives_its_keeper(make_slurm_trial: Any) -> None:
    """The cluster does not track processes by cgroups: SLURM alone would let the supervisor and Redis live on."""
    trial = make_slurm_trial({"master_worker/0": [ENDLESS]}, model_workers=1, servers=0)
    trial.submit()
    trial.wait_for_commits()
    keeper = read_lock(lock_path(trial.directory))
    assert keeper is not None
    os.kill(int(keeper["pid"]), signal.SIGKILL)
    wait_until(lambda: not trial.processes(), "the end of all processes")
    assert trial.wait_for_state("FAILED", "LOST").note and trial.events("attempt_ended", then="") == []


def test_a_stopped_controller_kills_nothing_and_a_dead_worker_comes_back(
    make_slurm_trial: Any, cluster: Cluster
) -> None:
    supervision = {"max_restarts": 1}  # spent by the kill: what SLURM refuses is no crash
    trial = make_slurm_trial({"master_worker/0": [ENDLESS]}, model_workers=1, servers=1, supervision=supervision)
    trial.submit()
    trial.wait_for_commits()
    pid = wait_until(lambda: trial.starts("generation_server/0"), "the server")[0][0]
    cluster.stop_controller()
    stopped = time.monotonic()
    try:
        before = trial.num_commits
        os.kill(pid, signal.SIGKILL)
        trial.wait_for("task_ended", who="generation_server/0", why="could not be started: SLURM did not answer")
        wait_until(lambda: trial.num_commits > before + 20, "commits, since it trained all the time")
    finally:
        cluster.start_controller()
    wait_until(lambda: len(trial.starts("generation_server/0")) >= 2, "the server again")
    print(f"server runs again {time.monotonic() - stopped:.1f} s after the controller stopped")
    assert len(trial.starts("master_worker/0")) == len(trial.starts("model_worker/0")) == 1
    assert ends_of(trial) == []
    node = head_of(trial)
    cluster.run("scancel", trial.job_id)
    trial.wait_for_end("CANCELLED")
    # The step that ended meanwhile says so again only after a minute, and the job is not over before: not ours to wait.
    for state in ("down", "resume"):
        cluster.run("scontrol", "update", f"nodename={node}", f"state={state}", "reason=forget the step")


def test_a_trial_that_is_submitted_from_inside_a_job_is_none_of_its_steps(
    make_slurm_trial: Any, cluster: Cluster
) -> None:
    # What sbatch and srun of the outer job have set would be options of ours, and its restart count our attempt.
    outer = ("srun", "--ntasks=1", "--cpus-per-task=3", "--mem=100", "--time=1")
    trial = make_slurm_trial({"master_worker/0": [END_AT_ONCE]}, **ONE_NODE)
    trial.prepare_files()
    program = (
        "import os, sys; from pathlib import Path; from corral.launcher.slurm.client import SlurmClient\n"
        "print(os.environ['SLURM_JOB_ID'], SlurmClient().submit([], Path(sys.argv[1])))"
    )
    done = cluster.run(*outer, sys.executable, "-c", program, str(trial.directory.sbatch_path))
    outer_id, job_id = done.stdout.split()
    assert job_id != outer_id
    trial.submitted(job_id)
    trial.wait_for_end()
    assert len(read_attempts(trial.directory)) == 1
    assert [job.job_id for job in trial.jobs] == [job_id]
    wait_until(lambda: (SlurmClient().job(job_id) or {}).get("JobState") == "COMPLETED", "SLURM's COMPLETED")


def test_steps_that_ignore_sigterm_do_not_hold_up_the_end(make_slurm_trial: Any) -> None:
    trial = make_slurm_trial(
        {"master_worker/0": ["finish 0"], "model_worker/0": ["stubborn"]}, **ONE_NODE, supervision={"stop_grace_s": 1.0}
    )
    trial.submit()
    trial.wait_for_end()
    trial.wait_for_empty_queue()
    assert trial.processes() == []


def crash(cluster: Cluster, node: str) -> None:
    """The node is gone, and SLURM notices now rather than after SlurmdTimeout."""
    cluster.kill_node(node)
    cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=crashed")


def take_all_nodes(cluster: Cluster) -> None:
    """Somebody's job in the partition that goes before `spot`."""
    cluster.run(
        "sbatch", "-p", "debug", "-N4", "--exclusive", "-t1", "--output=/dev/null", "--wrap", "sleep 2"
    )  # fmt: skip


def head_of(trial: SlurmTrial) -> str:
    """The node of the batch step."""
    job = next(job for job in SlurmClient().queue() if job.job_id == trial.job_id)
    return str((SlurmClient().job(job.job_id) or {})["BatchHost"])


def ends_of(trial: SlurmTrial) -> list[dict[str, Any]]:
    return trial.events("attempt_ended")
