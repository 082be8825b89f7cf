"""The shipped recipes under a real SLURM: every worker is a step of one allocation that spans several nodes."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.slurm.client import SlurmClient
from tests.integration.evidence import (
    audited,
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
    find_secrets,
)
from tests.integration.trial_helpers import WORKERS, Trial, read_lines
from tests.slurm.cluster import Cluster
from tests.slurm.trials import job_of
from tests.test_customize import DOCUMENT, FILES

pytestmark = pytest.mark.slurm


def test_the_shipped_recipe_with_files_of_ones_own_spans_nodes_and_completes(
    start_job: Callable[..., Trial], cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, reward, loss and sampler are those of docs/customize.md."""
    (own,) = re.findall(r"```yaml\n(dataset:\n  transform.*?)```", DOCUMENT.read_text(), re.DOTALL)
    files = {f"{name}.py": FILES[name] for name in ("my_rows", "my_reward", "gentle_loss", "my_order")}
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    settings = {f"{key}.{name}": value for key, keys in yaml.safe_load(own).items() for name, value in keys.items()}
    paced = {"function": "paced_rewards:digits", "weight": 0.0}  # measures, and holds the trial up for this test
    settings["evaluation.dataset.transform"] = settings["dataset.transform"]
    settings["rollout.reward"] = json.dumps({"own": {"function": settings["rollout.reward"]}, "paced": paced})
    trial = start_job(
        "grpo",
        num_rows=48,
        pause_s=0.1,
        overrides={
            "groups.generation_server.scheduling.cpu": 7,
            "train_batch_size": 6,
            "evaluation.every": "1000 steps",
            **settings,
        },
    )
    kept = {path.name for path in trial.directory.code_path.iterdir()}
    assert kept == {*files, "paced_rewards.py"} - {"my_rows.py"}  # rows are made once, when it is submitted
    trial.wait_for_steps(1)
    rows = trial.wait_until_running()
    assert set(rows) == set(WORKERS) and len({row["node"] for row in rows.values()}) >= 2, rows
    assert rows["model_worker/0"]["node"] != rows["generation_server/0"]["node"]
    canaries = [secret.reveal() for secret in TrialSecrets.load(trial.directory.secrets_path).values()]
    assert find_secrets(trial.directory, canaries) == {"secrets/secrets.json", "secrets/server.pem"}
    shown = cluster.run("scontrol", "show", "job", "--details", job_of(trial)).stdout
    assert trial.uuid in shown and not [canary for canary in canaries if canary in shown]
    trial.kill("rollout_worker/0", pid=rows["rollout_worker/0"]["pid"])
    trial.wait_for_steps(2)
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    assert audited(trial) == "48 prompts trained, 0 dropped, as drawn: skipped 0, repeated 0\n"
    trial.uids = [line["uid"] for line in read_lines(trial.directory.trajectories_path)]  # rewards say which are drawn
    assert check_no_token_was_too_old(trial, eta=1) == 1
    for line in (line for line in trial.metrics() if "ppo/loss" in line):
        assert 0.0 < line["gentle/worse_fraction"] < 1.0 and line["reward/part/own/characters"] > 0.0
        assert line["rewards/mean"] == pytest.approx(line["reward/part/own"], abs=1e-6)
    check_the_job_is_gone(trial)
    paths = {Path(path).name for path in trial.logs("--path").split()}
    assert paths >= {f"{worker.replace('/', '-')}.log" for worker in WORKERS}
    assert "follows trainer epoch 1" in trial.logs("model_worker/0")


@pytest.mark.slow
def test_sglang_generates_on_a_node_of_its_own_and_leaves_nothing_there(start_job: Callable[..., Trial]) -> None:
    trial = start_job(
        "grpo",
        num_rows=48,
        overrides={
            "allocation": "sglang:d1+fsdp:d1",
            "groups.generation_server.scheduling.cpu": 7,
            "evaluation.every": "1000 steps",
        },
    )
    trial.wait_for_steps(1, timeout_s=240.0)
    (server,) = (pid for pid in trial.processes() if is_sglang(pid))
    group = os.getpgid(server)
    assert len(running_in(group)) >= 3
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_the_job_is_gone(trial)
    # SGLang's own processes write their names over the environment by which a trial's are known.
    assert running_in(group) == []


def is_sglang(pid: int) -> bool:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return any(argument.endswith(b"/generation/sglang_entry") for argument in arguments)


def running_in(group: int) -> list[int]:
    """Processes of a group, without those that only wait for somebody to note their end."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def check_the_job_is_gone(trial: Trial) -> None:
    gone = ("COMPLETED", "CANCELLED", "FAILED")
    trial.wait_for(
        lambda: (SlurmClient().job(job_of(trial)) or {"JobState": "COMPLETED"})["JobState"] in gone,
        f"the end of job {job_of(trial)}",
        may_end=True,
    )
