"""The sbatch call: options are data, the script is constant but for quoted paths, whatever the names and values."""

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.experiments.errors import ConfigError
from corral.experiments.trial_directory import TrialDirectory
from corral.launcher.packed import pack
from corral.launcher.sbatch import job_name, render_script, sbatch_options
from tests.launcher.trials import make_plan

GOLDEN_SCRIPT = """\
#!/bin/bash
# Made by rl-submit for trial /scratch/my runs/exp/trial, attempt 2.

# sbatch set these for the job; as defaults of srun they are wrong for every step inside it.
for name in $(compgen -e); do
  case $name in
    SLURM_NTASKS* | SLURM_NPROCS | SLURM_TASKS_PER_NODE | SLURM_CPUS_PER_* | SLURM_TRES_PER_TASK | SLURM_MEM_PER_* | \\
    SLURM_GPUS* | SLURM_DISTRIBUTION | SLURM_CPU_BIND* | SLURM_EXPORT_ENV | SRUN_*) unset "$name" ;;
  esac
done

exec /opt/python -m corral.launcher.supervisor --trial '/scratch/my runs/exp/trial' --attempt 2
"""


def render(path: str, *, attempt: int = 0, python: str = "/opt/python") -> str:
    return render_script(TrialDirectory(Path(path)), attempt=attempt, python=Path(python))


def test_the_script_sets_the_environment_straight_and_becomes_the_supervisor() -> None:
    assert render("/scratch/my runs/exp/trial", attempt=2) == GOLDEN_SCRIPT


def test_the_options_ask_for_one_task_per_node_and_tag_the_job() -> None:
    plan = make_plan(
        Path("/scratch/exp/trial"),
        mode="slurm",
        model_workers=2,
        servers=1,
        task={"cpu": 2, "mem": 500},
        launch={"partition": "debug", "time_limit": "1:00:00", "extra_sbatch_arguments": ["--licenses=a:1"]},
        cluster={"cpus_per_node": 8, "mem_per_node": 8000},
    )
    layout = pack(plan)
    options = sbatch_options(plan, layout, TrialDirectory(Path("/scratch/exp/trial")), attempt=1)
    comment = next(option for option in options if option.startswith("--comment="))
    assert json.loads(comment.removeprefix("--comment=")) == {
        "corral": 1,
        "trial_uuid": plan.trial.uuid,
        "directory": "/scratch/exp/trial",
        "attempt": 1,
    }
    assert [option for option in options if option != comment] == [
        "--job-name=exp.trial",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=7",
        "--mem=2524M",
        "--output=/scratch/exp/trial/logs/slurm-%j.log",
        "--open-mode=append",
        "--no-requeue",
        "--signal=B:USR2@180",
        "--export=ALL",
        "--partition=debug",
        "--time=1:00:00",
        "--licenses=a:1",
    ]


def test_gpus_are_asked_for_by_type() -> None:
    plan = make_plan(Path("/s/exp/trial"), mode="slurm", gpu=1, gpu_type="a100", cluster={"gpus_per_node": 8})
    options = sbatch_options(plan, pack(plan), TrialDirectory(Path("/s/exp/trial")), attempt=0)
    assert "--gres=gpu:a100:3" in options


def test_groups_that_ask_for_different_partitions_do_not_pack() -> None:
    plan = make_plan(Path("/s/exp/trial"), mode="slurm", task={"partition": "a"}, launch={"partition": "b"})
    with pytest.raises(ConfigError, match="asked for as a, b"):
        pack(plan)


def test_a_percent_sign_in_the_path_reaches_sbatch_doubled() -> None:
    plan = make_plan(Path("/s/100%j/trial"), mode="slurm")
    options = sbatch_options(plan, pack(plan), TrialDirectory(Path("/s/100%j/trial")), attempt=0)
    assert "--output=/s/100%%j/trial/logs/slurm-%j.log" in options


@pytest.mark.parametrize("name", ["a\nb", "a b", "a/b", "$(x)", "-x", ""])
def test_a_job_name_is_plain(name: str) -> None:
    with pytest.raises(ValueError, match="trial name"):
        job_name("exp", name)


@pytest.mark.parametrize("path", ["/tmp/a\n#SBATCH --exclusive", "/tmp/\x1b[2J", "/tmp/a\rb"])
def test_a_path_with_control_characters_never_becomes_a_script(path: str) -> None:
    with pytest.raises(ValueError, match="control character"):
        render(path)


HOSTILE = [
    "$(touch canary)",
    "`touch canary`",
    "';touch canary;'",
    '"; touch canary; "',
    "a b",
    "${#x[@]}",
    "<% x %>",
    "*",
    "é",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_paths_reach_the_supervisor_as_they_are(name: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "trial.sbatch"
    script.write_text(render(f"/scratch/{name}", python=str(python)))
    said = subprocess.run(["bash", str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=10, check=True)
    assert said.stdout.splitlines() == [
        "-m",
        "corral.launcher.supervisor",
        "--trial",
        f"/scratch/{name}",
        "--attempt",
        "0",
    ]
    assert not (tmp_path / "canary").exists()


PRINTABLE = st.text(
    st.characters(exclude_categories=("C", "Z")) | st.sampled_from(" '\"$`\\;&|<>(){}#%!*?~"), min_size=1
)


@settings(max_examples=20, deadline=None)
@given(PRINTABLE)
def test_every_printable_path_gives_a_script_that_bash_can_parse(name: str) -> None:
    script = render(f"/scratch/{name}")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10, capture_output=True)


def test_an_enclosing_jobs_step_defaults_do_not_reach_the_supervisor(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nenv\n")
    python.chmod(0o755)
    script = tmp_path / "trial.sbatch"
    script.write_text(render("/scratch/t", python=str(python)))
    environment = {
        "PATH": "/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_MEM_PER_NODE": "5",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_GPUS_ON_NODE": "2",
        "SRUN_CPUS_PER_TASK": "3",
    }
    said = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=10, check=True
    )
    assert "SLURM_JOB_ID=7" in said.stdout
    kept = {line.partition("=")[0] for line in said.stdout.splitlines() if line.startswith(("SLURM_", "SRUN_"))}
    assert kept == {"SLURM_JOB_ID"}
