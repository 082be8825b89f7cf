"""Between the tests of single events: extra jobs across attempts, odd shells, a controller that is away."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from corral.launcher.slurm.client import SlurmClient, SlurmUncertainError
from corral.launcher.slurm.job_queue import SlurmQueue, is_head_of, submit_once
from corral.launcher.slurm.own_jobs import OwnJobs
from corral.launcher.submit.prepare import Submission, SubmissionError, prepare_resume
from corral.launcher.submit.start import start
from tests.launcher.trials import stop_and_wait, wait_until
from tests.slurm.cluster import Cluster, missing_programs, running_cluster
from tests.slurm.trials import SlurmTrial

pytestmark = pytest.mark.slurm

ENDLESS = "steps 100000 0.1"
GROWS_OLD = {"master_worker/0": [ENDLESS, "steps 1 0"]}
JOBS: dict[str, Any] = {"launch": {"layout": "jobs"}, "model_workers": 1, "servers": 1}
ONE_NODE: dict[str, Any] = {"model_workers": 1, "servers": 0}
GROUPS = ("model_worker", "generation_server")


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """A cluster of their own, which forgets jobs at once: these tests stop its controller."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"SLURM is not installed: no {', '.join(missing)}")
    with running_cluster() as cluster:
        cluster.update_config(MinJobAge=5)
        yield cluster


def test_a_trainer_whose_job_is_put_back_takes_its_master_along_and_a_new_supervisor_keeps_all_jobs(
    make_slurm_trial: Any, cluster: Cluster
) -> None:
    trial = make_slurm_trial({"master_worker/0": [ENDLESS, ENDLESS, "steps 1 0"]}, **JOBS)
    trial.submit()
    trial.wait_for_commits()
    jobs = {job.job_id for job in trial.active_jobs}
    trainer = next(job for job in trial.active_jobs if job.tag["allocation"] == "model_worker")
    cluster.run("scontrol", "requeue", trainer.job_id)
    wait_until(lambda: len(trial.starts("master_worker/0")) == 2, "the master again")
    assert {event["unit"] for event in trial.events("unit_left")} == {"model_worker", "master_worker/0"}
    assert not trial.events("unit_restarting")  # nobody is charged
    assert len(trial.starts("generation_server/0")) == 1
    wait_until(lambda: len(trial.starts("model_worker/0")) == 2, "the trainer again")

    os.kill(trial.events("supervisor_started")[-1]["pid"], signal.SIGKILL)
    trial.wait_for_end()
    assert {event["allocation"] for event in trial.events("extra_job_adopted")} == set(GROUPS)
    assert {event["job_id"] for event in trial.events("extra_job_running")} <= jobs
    assert len(trial.events("extra_job_submitted")) == len(GROUPS)
    trial.wait_for_empty_queue()


def test_a_trial_that_loses_a_component_of_its_job_goes_on_in_a_new_one(
    make_slurm_trial: Any, cluster: Cluster
) -> None:
    trial = make_slurm_trial(GROWS_OLD, model_workers=1, servers=1)
    server = trial.plan.scheduling.generation_server
    elsewhere = server.model_copy(update={"scheduling": server.scheduling.model_copy(update={"partition": "spot"})})
    trial.replan(scheduling=trial.plan.scheduling.model_copy(update={"generation_server": elsewhere}))
    assert trial.layout.kind == "hetjob"
    job_id = trial.submit()
    trial.wait_for_commits()
    cluster.run("scancel", f"{job_id}+1")
    trial.wait_for_end()
    first, second = trial.events("attempt_ended")
    assert "generation_server/0 runs in component 1" in first["cause"] and first["then"] == "successor"
    assert second["state"] == "COMPLETE"
    trial.wait_for_empty_queue()


def test_a_controller_that_is_away_when_the_job_starts_is_waited_for(
    make_slurm_trial: Any, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_slurm_trial({"master_worker/0": ["steps 1 0"]}, **ONE_NODE)
    go = trial.directory.path / "go"
    submit_script = SlurmClient.submit

    def submit_patiently(client: SlurmClient, options: list[str], script: Path) -> str:
        text = script.read_text().replace("\nexec ", f"\nwhile [ ! -e {go} ]; do sleep 0.1; done\nexec ")
        script.write_text(text)
        return submit_script(client, options, script)

    monkeypatch.setattr(SlurmClient, "submit", submit_patiently)
    trial.submit()
    wait_until(lambda: [job for job in trial.active_jobs if job.word == "RUNNING"], "the job")
    cluster.stop_controller()
    try:
        go.touch()
        claim = trial.directory.control_path / "claim-0.json"
        wait_until(claim.exists, "the keeper")
        wait_until(lambda: "waiting for" in output_of(trial), "the supervisor to wait")
    finally:
        cluster.start_controller()
    trial.wait_for_end()


def test_of_two_resumptions_at_once_one_submits(make_slurm_trial: Any) -> None:
    trial = make_slurm_trial({"master_worker/0": [ENDLESS]}, **ONE_NODE)
    trial.submit()
    trial.wait_for_commits()
    assert stop_and_wait(trial.facts).state == "STOPPED"
    trial.wait_for_empty_queue()
    prepared = [prepare_resume(trial.facts) for _ in range(2)]  # both have seen that nobody is there

    def resume(submission: Submission) -> str:
        try:
            return start(submission, resume=True)
        except SubmissionError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(resume, prepared))
    (job_id,) = [answer for answer in answers if answer.isdigit()]
    assert [job.job_id for job in trial.active_jobs] == [job_id]


def test_a_job_that_sbatch_was_kept_from_naming_is_found(
    make_slurm_trial: Any, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_slurm_trial({"master_worker/0": ["steps 1 0"]}, **ONE_NODE)
    script = tmp_path / "trial.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH --output=/dev/null\n#SBATCH --comment='{tag_of(trial)}'\nsleep 60\n")
    real = cluster.run("sh", "-c", "command -v sbatch").stdout.strip()
    slow = tmp_path / "bin" / "sbatch"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\n{real} "$@" > /dev/null\nexec sleep 60\n')
    slow.chmod(0o700)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    is_it = is_head_of(OwnJobs(trial.directory, trial.plan.trial))
    client = SlurmClient(timeout_s=2.0)
    trial.job_id = submit_once(SlurmQueue(client), lambda: client.submit([], script), is_it=is_it)
    assert [job.job_id for job in trial.active_jobs] == [trial.job_id]
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    cluster.run("scancel", trial.job_id)
    with pytest.raises(SlurmUncertainError, match="did not answer within 2 s"):
        submit_once(SlurmQueue(client), lambda: client.submit([], script), is_it=is_it)


def test_a_users_shell_decides_nothing(make_slurm_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "SBATCH_PARTITION": "short", "SBATCH_EXPORT": "NONE", "SBATCH_NO_REQUEUE": "1", "SBATCH_ARRAY_INX": "0-3",
        "SLURM_NTASKS": "5", "SLURM_PARTITION": "short", "SLURM_OVERLAP": "1", "SLURM_GRES": "gpu:9",
        "SRUN_CPUS_PER_TASK": "3", "SQUEUE_PARTITION": "short", "SCANCEL_STATE": "PENDING", "SINFO_PARTITION": "short",
        "SLURM_TIME_FORMAT": "relative", "USER": "nobody", "LOGNAME": "nobody", "XDG_CACHE_HOME": "/proc/nowhere",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HOME", raising=False)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    umask = os.umask(0o077)
    try:
        trial = make_slurm_trial(
            {"master_worker/0": ["steps 5 0.1"]}, folder=f"link/{'/'.join(['long' * 40] * 4)}", **JOBS
        )
        trial.submit()
    finally:
        os.umask(umask)
    trial.wait_for_end()
    assert len(trial.events("extra_job_running")) == len(GROUPS)
    trial.wait_for_empty_queue()


def tag_of(trial: SlurmTrial) -> str:
    return f'{{"corral":1,"trial_uuid":"{trial.plan.trial.uuid}","directory":"/nowhere","allocation":"head"}}'


def output_of(trial: SlurmTrial) -> str:
    """What the job has printed."""
    log = trial.directory.logs_path / f"slurm-{trial.job_id}.log"
    return log.read_text() if log.exists() else ""
