"""A run longer than any of its jobs: links of a minute follow each other until it is complete."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.evidence import (
    History,
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Trial
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

NUM_LINKS = 4
# SLURM looks at time limits every 30 s, so a link gets its signal 20 to 50 s after its start.
LINK: dict[str, object] = {"launch.time_limit": "1", "launch.signal_before_end_s": 10}
# Enough for more links than are asked for, also where nothing else slows the trial down.
WORK: dict[str, Any] = {"num_rows": 192, "num_passes": 2, "pause_s": 0.6, "runs_on": True}


def test_a_run_of_four_links_finishes_without_a_human(start_job: Callable[..., Trial], cluster: Cluster) -> None:
    trial = start_job("grpo", overrides={**LINK, "evaluation.every_steps": 1000}, **WORK)
    trial.wait_for(
        lambda: len(trial.events("attempt_ended")) >= NUM_LINKS - 1, "the links", timeout_s=600.0, pause_s=0.5
    )
    trial.full_speed()
    trial.wait_for(
        lambda: trial.events("trial_ended"), "the end of the chain", timeout_s=600.0, pause_s=0.5, may_end=True
    )
    ends = trial.events("attempt_ended")
    print("\n".join(gaps(trial)))
    assert [end["state"] for end in ends] == ["TIMED_OUT"] * (len(ends) - 1) + ["COMPLETE"], ends
    assert len(ends) >= NUM_LINKS
    trial.wait_for(lambda: not trial.processes(), "its last process to go", may_end=True)

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert check_no_token_was_too_old(trial, eta=1) == 1
    commits = [entry for entry in History.of(trial).entries.values() if entry["kind"] == "commit"]
    steps = [commit["step"] for commit in commits]
    assert steps == list(range(1, len(steps) + 1))  # each link went on where the one before it had committed
    trial.wait_for(
        lambda: not cluster.run("squeue", "-h", "-t", "PD,R,CG").stdout.strip(), "an empty queue", may_end=True
    )


def gaps(trial: Trial) -> list[str]:
    """What lies between the links, in seconds."""
    lines = []
    trained = [line["time"] for line in trial.metrics() if "time/train_s" in line]
    for end in trial.events("attempt_ended"):
        (start,) = trial.events("supervisor_started", attempt=end["attempt"])
        steps = [moment for moment in trained if start["time"] < moment < end["time"]]
        line = f"link {end['attempt']}: {end['time'] - start['time']:.1f} s, {len(steps)} steps"
        following = trial.events("supervisor_started", attempt=end["attempt"] + 1)
        if following and (later := [moment for moment in trained if moment > end["time"]]):
            job_s, step_s = following[0]["time"] - end["time"], later[0] - max(steps)
            line += f"; the next job runs {job_s:.1f} s after its end, the next step ends {step_s:.1f} s after the last"
        lines.append(line)
    return lines
