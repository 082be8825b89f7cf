"""Hostile names, paths and values: each is refused, or arrives in the job as it was written; none is ever executed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.errors import ConfigError
from corral.launcher.slurm.client import SlurmClient
from corral.launcher.submit import prepare, start
from corral.scheduling.scheduling import ExperimentScheduling, Scheduling, TasksGroup
from tests.experiments.broken_yaml import write_inputs
from tests.launcher.trials import stop_and_wait, wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.trials import SMALL, SlurmTrial
from tests.slurm.wrong_configurations import VALID_SLURM

pytestmark = pytest.mark.slurm

CANARY = "canary-was-executed"
HOSTILE = (
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"x; touch {CANARY}; #",
    f"x' ; touch {CANARY} ; '",
    f'x" ; touch {CANARY} ; "',
    f"x\ntouch {CANARY}",
    f"x\n#SBATCH --wrap='touch {CANARY}'",
    f"x && touch {CANARY} | cat > {CANARY}",
    f"${{IFS}}touch${{IFS}}{CANARY}",
    f"--wrap=touch {CANARY}",
    "-p",
    "%j%x%%u%",
    "two  words",
    "back\\slash\\",
    "*?[a-z]!!~",
    "a,b=c:d",
    "<% 7 * 7 %>{{ 7 * 7 }}",
    "\u00fcn\u00ef\u00a2\u00f8d\u00e9 \u2603",
    "line\u2028separator",
    "nul\x00byte",
)

OF_LAUNCH = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "time_limit")
FIELDS = (
    ("name",),
    *(("launch", name) for name in OF_LAUNCH),
    ("groups", "model_worker", "scheduling", "gpu_type"),
    ("cluster", "bind_address"),
    ("cluster", "container_python"),
    ("launch", "extra_sbatch_arguments"),
    ("launch", "sbatch_template"),
)


@pytest.fixture(autouse=True)
def no_canary(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands run in a folder in which, after all, nothing may have been touched."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(work))
    yield
    assert [path for path in tmp_path.rglob("*") if path.name == CANARY] == []
    assert not (Path("/tmp") / CANARY).exists()


@pytest.mark.parametrize("field", FIELDS, ids=".".join)
def test_a_hostile_value_is_refused_or_only_quoted(field: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever passes all checks has gone through `sbatch --test-only` and stands literally among the options."""
    write_inputs(tmp_path)
    (tmp_path / "experiment.yaml").write_text(VALID_SLURM)
    refused = 0
    for value in HOSTILE:
        given = [value] if field[-1] == "extra_sbatch_arguments" else value
        overrides = [f"cluster.fileroot={tmp_path / 'trials'}", f"{'.'.join(field)}={json.dumps(given)}"]
        try:
            submission = prepare.prepare(tmp_path / "experiment.yaml", overrides, trial_name=None, mode="slurm")
        except ConfigError as error:
            assert "\x1b" not in str(error) and "\n#SBATCH" not in str(error)
            refused += 1
            continue
        script = start.script_of(submission)
        assert script is not None
        assert subprocess.run(["bash", "-n"], input=script, capture_output=True).returncode == 0
        assert b"\ntouch" not in script and b"\n#SBATCH --wrap" not in script
        assert _value_at(submission.plan.config, field) == given
    print(f"{'.'.join(field)}: {refused} of {len(HOSTILE)} refused")
    assert refused >= len(HOSTILE) // 2 or field == ("cluster", "container_python")


@pytest.mark.parametrize("value", [value for value in HOSTILE if "\x00" not in value])  # no file name holds a NUL
def test_a_hostile_experiment_folder_is_refused_or_read_as_it_is_named(
    value: str, tmp_path: Path, cluster: Cluster
) -> None:
    """Model, data and trial directory all lie in it, and the job that holds its path is queued for real."""
    folder = tmp_path / value.replace("/", "_")
    write_inputs(folder)
    (folder / "experiment.yaml").write_text(VALID_SLURM + "cluster: {fileroot: trials}\n")
    overrides = ["launch.extra_sbatch_arguments=[--begin=now+1hour]"]
    try:
        submission = prepare.prepare(folder / "experiment.yaml", overrides, trial_name="t", mode="slurm")
    except ConfigError as error:
        assert "control character" in str(error) or "backslash" in str(error), error
        return
    start.create(submission)
    job_id = start.start(submission)
    try:
        job = SlurmClient().job(job_id)
        assert job is not None
        assert json.loads(job["Comment"])["directory"] == str(folder / "trials" / "small-grpo" / "t")
        assert submission.plan.config["actor"]["path"] == str(folder / "model")
        assert submission.plan.config["dataset"]["path"] == str(folder / "train.jsonl")
    finally:
        cluster.run("scancel", job_id)


LITERAL = tuple(value for value in HOSTILE if not any(character in value for character in "\n\x00\u2028"))


def test_hostile_values_reach_the_worker_as_they_were_written(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial in a folder with the worst of names, its workers with the worst of variables and containers, for real."""
    recorder = tmp_path / "bin" / "apptainer"
    recorder.parent.mkdir()
    recorded = tmp_path / "recorded"
    recorder.write_text(_RECORDER.format(python=sys.executable, recorded=str(recorded)))
    recorder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{recorder.parent}:{os.environ['PATH']}")
    variables = {f"HOSTILE_{index}": value for index, value in enumerate(LITERAL)}
    image = f"image $(touch {CANARY}) `touch {CANARY}`; 'x' \"y\" %j \u2603.sif"
    mounts = (f"/data/$(touch {CANARY}) 'x':/data/; touch {CANARY}", "/a b:/c d:ro")
    fileroot = tmp_path / f"$(touch {CANARY}) `touch {CANARY}`; 'q' \"d\" %j \u2603 -x"
    trial = SlurmTrial(fileroot, {"master_worker/0": ["master"]}, **(SMALL | {"servers": 1, "model_workers": 1}))
    plain = Scheduling(cpu=1, mem=64, env_vars=variables)
    boxed = plain.model_copy(update={"gpu": 1, "container_image": image, "container_mounts": mounts})
    trial.replan(
        cluster=trial.plan.cluster.model_copy(
            update={"container_runtime": "apptainer", "container_python": sys.executable}
        ),
        scheduling=ExperimentScheduling(
            master_worker=TasksGroup(count=1, scheduling=plain),
            model_worker=TasksGroup(count=1, scheduling=plain),
            generation_server=TasksGroup(count=1, scheduling=boxed),
            gserver_manager=TasksGroup(count=1, scheduling=plain),
        ),
    )
    try:
        job_id = trial.submit()
        (job,) = [job for job in SlurmClient().queue() if job.job_id == job_id]
        assert job.tag["directory"] == str(trial.directory.path)
        for worker in ("model_worker/0", "generation_server/0"):
            pid = wait_until(lambda worker=worker: trial.starts(worker), f"the start of {worker}")[0][0]
            environment = _strings(Path(f"/proc/{pid}/environ"))
            arguments = _strings(Path(f"/proc/{pid}/cmdline"))
            assert [f"{name}={value}" in environment for name, value in variables.items()] == [True] * len(variables)
            assert str(trial.directory.plan_path) in arguments
        call, of_container = json.loads(recorded.read_text())
        shared = [f"--bind={mount}" for mount in (f"{trial.directory.path}:{trial.directory.path}", *mounts)]
        assert call[: len(shared) + 4] == ["exec", "--nv", *shared, image, sys.executable]
        assert of_container["CUDA_VISIBLE_DEVICES"] == "0"
        given = variables | {"CORRAL_TRIAL_UUID": trial.plan.trial.uuid}
        assert {name: of_container[f"APPTAINERENV_{name}"] for name in given} == given
        assert stop_and_wait(trial.facts, grace_s=20.0).state == "STOPPED"
        assert (trial.directory.logs_path / f"slurm-{job_id}.log").exists()
    finally:
        if trial.job_id:
            cluster.run("scancel", trial.job_id)
        trial.close()


_RECORDER = """#!{python}
import json, os, sys
with open({recorded!r}, "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
start = next(index for index, argument in enumerate(sys.argv) if argument == {python!r})
os.execv(sys.argv[start], sys.argv[start:])
"""


def _value_at(config: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


def _strings(path: Path) -> list[str]:
    return os.fsdecode(path.read_bytes()).split("\0")


@pytest.mark.parametrize(
    "wrong",
    [
        {"env_vars": {"A B": "x"}},
        {"env_vars": {"A;touch x": "x"}},
        {"env_vars": {"SLURM_CONF": "/x"}},
        {"env_vars": {"A": "x\ny"}},
        {"container_image": "--writable"},
        {"container_image": "a\nb"},
        {"container_mounts": ["/a:/b,/etc:/etc"]},
        {"container_mounts": ["$(id):/b"]},
    ],
    ids=str,
)
def test_what_could_be_read_as_something_else_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Scheduling.model_validate({"cpu": 1, "mem": 1, **wrong})
