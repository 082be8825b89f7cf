"""A run longer than any of its jobs: links that SLURM ends at their time limit follow each other until it is done."""

from collections.abc import Callable
from typing import Any

import pytest

from corral.launcher.slurm.client import SlurmClient
from corral.scheduling.slurm_formats import parse_time_limit
from tests.integration.evidence import (
    History,
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Trial
from tests.slurm.cluster import Cluster
from tests.slurm.trials import job_of

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

NUM_LINKS = 4
STEPS_OF_A_LINK = 2  # committed before its end comes near
SIGNAL_BEFORE_END_S = 300
LINK: dict[str, object] = {"launch.time_limit": "60", "launch.signal_before_end_s": SIGNAL_BEFORE_END_S}
WORK: dict[str, Any] = {"num_rows": 128, "num_passes": 2, "pause_s": 0.2}
TIMEOUT_S = 600.0


def test_a_run_of_four_links_finishes_without_a_human(start_job: Callable[..., Trial], cluster: Cluster) -> None:
    trial = start_job("grpo", overrides={**LINK, "evaluation.every": "1000 steps"}, **WORK)
    for link in range(NUM_LINKS - 1):
        wait_for_commits(trial, STEPS_OF_A_LINK)
        bring_the_end_near(cluster, job_of(trial))
        wait_for_event(trial, "attempt_ended", attempt=link)
    trial.full_speed()
    wait_for_event(trial, "attempt_ended", then="")
    ends = trial.events("attempt_ended")
    assert [end["state"] for end in ends] == ["TIMED_OUT"] * (NUM_LINKS - 1) + ["COMPLETE"], ends
    trial.wait_for(lambda: not trial.processes(), "its last process to go", may_end=True)

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert check_no_token_was_too_old(trial, eta=1) == 1
    steps = committed_steps(trial)
    assert steps == list(range(1, len(steps) + 1))  # each link went on where the one before it had committed
    trial.wait_for(
        lambda: not cluster.run("squeue", "-h", "-t", "PD,R,CG").stdout.strip(), "an empty queue", may_end=True
    )


def wait_for_commits(trial: Trial, more: int) -> None:
    """Until the link that runs, or is about to start, has committed so many steps."""
    before = len(committed_steps(trial))
    trial.wait_for_steps(more, timeout_s=TIMEOUT_S)
    trial.wait_for(lambda: len(committed_steps(trial)) >= before + more, f"{more} commits after {before}")


def committed_steps(trial: Trial) -> list[int]:
    return [entry["step"] for entry in History.of(trial).entries.values() if entry["kind"] == "commit"]


def bring_the_end_near(cluster: Cluster, job_id: str) -> None:
    """Shortens the time limit so far that SLURM sends its signal when it next looks, which it does every 30 s.

    Limits are whole minutes, so what is left for the last commit is up to a minute less than SIGNAL_BEFORE_END_S.
    """
    job = SlurmClient().job(job_id)
    assert job is not None, f"job {job_id} has gone"
    minutes = (parse_time_limit(job["RunTime"]) + SIGNAL_BEFORE_END_S) // 60
    shortened = cluster.run("scontrol", "update", f"JobId={job_id}", f"TimeLimit={minutes}")
    assert shortened.returncode == 0, shortened.stderr


def wait_for_event(trial: Trial, name: str, **fields: Any) -> None:
    trial.wait_for(lambda: trial.events(name, **fields), f"{name} {fields}", timeout_s=TIMEOUT_S, pause_s=0.5)
