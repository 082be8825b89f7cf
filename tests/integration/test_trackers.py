"""Trackers of a trial that is killed, stopped and resumed have each step once; their deaths are none of its own."""

import re
from collections.abc import Callable

import pytest

from tests.integration.trial_helpers import ROOT, Trial
from tests.tracked import check_same, in_mlflow, in_prometheus, in_tensorboard, in_wandb, written

READERS = {"tensorboard": in_tensorboard, "wandb": in_wandb, "mlflow": in_mlflow}


@pytest.mark.slow
def test_trackers_have_each_step_once_over_their_deaths_the_masters_and_a_resume(
    start_trial: Callable[..., Trial],
) -> None:
    trial = start_trial(
        num_rows=96,
        pause_s=0.1,
        overrides={
            "control.commit_every": "2 steps",
            "evaluation.every": "3 steps",
            "tracking.to": f"[{', '.join(READERS)}, prometheus]",
        },
    )
    trackers = [f"tracker/{index}" for index in range(len(READERS))]
    trial.wait_for_steps(2)
    for _ in range(2):
        for tracker in trackers:
            trial.kill(tracker)
    trial.wait_for_uncommitted_step(commit_every_steps=2)
    trial.kill("master_worker/0")
    trial.wait_for_steps(2)
    assert "STOPPED" in trial.run("rl-stop")
    trial.run_resume()
    trial.full_speed()
    trial.wait_for_end()
    assert trial.train_steps() == list(range(1, 13))
    for read in READERS.values():
        check_same(read(trial.directory), written(trial.directory))
    (path,) = (trial.directory.path / "tracking" / "prometheus").iterdir()
    found = in_prometheus(path)
    assert found["corral_step"] == 12
    shown = set(re.findall(r"corral_\w+", (ROOT / "docs" / "grafana.json").read_text()))
    assert shown <= {name.partition("/")[0] for name in found} | {
        "corral_gpu_memory_used_bytes",
        "corral_gpu_utilization_ratio",
    }
    assert not trial.events("unit_given_up")
