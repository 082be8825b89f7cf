"""rl-submit's options against a real SLURM: what a dry run prints is what a submission hands over."""

import re
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from corral.experiments.plan import RunPlan
from tests.experiments.broken_yaml import write_inputs
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Ended
from tests.slurm.wrong_configurations import VALID_SLURM

pytestmark = pytest.mark.slurm


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """A folder whose name needs quotes everywhere."""
    folder = tmp_path / 'it\'s a "folder" of $HOME; 100%'
    write_inputs(folder)
    (folder / "experiment.yaml").write_text(VALID_SLURM)
    return folder


@pytest.fixture
def submit(folder: Path, rl_submit: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """`rl-submit` with these arguments, in the folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    return partial(rl_submit, "--fileroot", str(folder / "trials"))


@pytest.mark.parametrize("layout", ["packed", "hetjob", "jobs"])
def test_a_dry_run_prints_the_script_that_a_submission_hands_over(
    submit: Callable[..., Ended], folder: Path, cluster: Cluster, layout: str
) -> None:
    later = ["experiment.yaml", "-n", "a", "--sbatch-arg=--begin=now+1hour", "--layout", layout]
    if layout == "hetjob":
        later += ["-s", "groups.rollout_worker.scheduling.partition=spot"]
    dry = submit(*later, "--dry-run=script")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.startswith("#!/bin/bash\n") and "checks     partition" in dry.stderr
    assert not (folder / "trials").exists()
    real = submit(*later, "-v")
    assert real.returncode == 0, real.stderr
    try:
        directory = folder / "trials" / "small-grpo" / "a"
        script = (directory / "trial.sbatch").read_text()
        uuid = RunPlan.from_json((directory / "plan.json").read_bytes()).trial.uuid
        assert uuid in script and uuid not in dry.stdout
        assert script.replace(uuid, "U") == re.sub(r"\b[0-9a-f]{32}\b", "U", dry.stdout)
        command = re.search(r"^command +(.*)$", real.stdout, re.MULTILINE)
        assert command is not None, real.stdout
        assert shlex.split(command[1]) == ["sbatch", "--parsable", str(directory / "trial.sbatch")]
        listed = subprocess.run(["bash", "-n"], input=dry.stdout, capture_output=True, text=True, timeout=120)
        assert listed.returncode == 0, listed.stderr
    finally:
        job = re.search(r"^job +(\d+)", real.stdout, re.MULTILINE)
        assert job is not None, real.stdout
        cluster.run("scancel", job[1])


def test_a_dry_run_shows_plan_checks_and_profiles(submit: Callable[..., Ended], folder: Path) -> None:
    profile = folder / ".config" / "corral" / "profiles" / "site.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("launch: {partition: spot, extra_sbatch_arguments: [--nice=5]}\n")
    shown = submit("experiment.yaml", "--dry-run", "--profile", "site", "--sbatch-arg=--mail-type=END")
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout
    assert "partition spot ok" in text and "site.yaml" in text and "profiles " in text
    assert not (folder / "trials").exists()
    script = submit("experiment.yaml", "--dry-run=script", "--profile", "site", "--sbatch-arg=--mail-type=END").stdout
    assert "--nice" in script and "--mail-type" in script


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sbatch-arg=--nodes=3"], "--sbatch-arg=--nodes=3"),
        (["--sbatch-arg=--gres=gpu:2"], "hint: leave it out: use the fields gpu and gpu_type"),
        (["--sbatch-arg=--comment=x"], "hint: leave it out"),
        (["--sbatch-arg=-J x"], "hint: write --name=value"),
        (["--no-checks", "--local"], "with --local there is none"),
        (["--sbatch-arg=a\nb"], "control character"),
        (["--layout", "heap"], "heap"),
        (["--dry-run=everything"], "everything"),
        (["--local", "--dry-run=script"], "there is no script"),
        (["--wait", "--follow"], "choose one"),
        (["--resume", "x"], "leave out experiment.yaml"),
        (["--profile", "nowhere"], "no profile named"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    submit: Callable[..., Ended], folder: Path, arguments: list[str], words: str
) -> None:
    refused = submit("experiment.yaml", *arguments)
    assert refused.returncode == 2, refused
    assert words in refused.stderr and "Traceback" not in refused.stderr
    assert not (folder / "trials").exists()


def test_an_option_of_the_command_line_is_blamed_where_it_was_typed(submit: Callable[..., Ended], folder: Path) -> None:
    profile = folder / "site.yaml"
    profile.write_text("launch: {extra_sbatch_arguments: [--nice=5]}\n")
    typed = ["--profile", str(profile), "--sbatch-arg=--licenses=matlab:1"]
    refused = submit("experiment.yaml", "--dry-run", *typed)
    assert refused.returncode == 5
    assert "--sbatch-arg=--licenses=matlab:1  launch.extra_sbatch_arguments.1: --licenses=matlab:1" in refused.stderr
