"""Batch scripts: options are data on lines of their own, the rest is constant but for quoted paths."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.layout.layout import PlacedTrial
from corral.launcher.layout.planner import plan_layout
from corral.launcher.slurm.own_jobs import job_name
from corral.launcher.slurm.sbatch import (
    extra_job_options,
    render_extra_job,
    render_script,
    sbatch_lines,
    sbatch_options,
    submission_command,
    successor_options,
)
from corral.scheduling.scheduling import ElasticTasks, Scheduling
from tests.launcher.trials import make_plan

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
CLUSTER = {"cpus_per_node": 8, "mem_per_node": 8000, "gpus_per_node": 8}


def small_plan(path: str = "/s/exp/trial", **options: Any) -> RunPlan:
    merged: dict[str, Any] = {"mode": "slurm", **options, "cluster": CLUSTER | options.get("cluster", {})}
    plan = make_plan(Path(path), **merged)
    return plan.model_copy(update={"trial": plan.trial.model_copy(update={"uuid": "0" * 32})})


def with_group(plan: RunPlan, kind: Any, **fields: Any) -> RunPlan:
    """The plan with other resources for one group."""
    group = plan.scheduling[kind]
    changed = group.model_copy(update={"scheduling": group.scheduling.model_copy(update=fields)})
    return plan.model_copy(update={"scheduling": plan.scheduling.model_copy(update={kind: changed})})


def with_elastic_server(plan: RunPlan, **fields: Any) -> RunPlan:
    """The plan with one elastic generation server more."""
    group = plan.scheduling["generation_server"]
    elastic = ElasticTasks(count=1, scheduling=Scheduling(**({"cpu": 2, "mem": 500} | fields)))
    changed = plan.scheduling.model_copy(update={"generation_server": group.model_copy(update={"elastic": elastic})})
    server = plan.worker("generation_server", 0).model_copy(update={"index": group.count})
    return plan.model_copy(update={"scheduling": changed, "workers": [*plan.workers, server]})


def render(path: str = "/s/exp/trial", *, python: str = "/opt/python", **options: Any) -> str:
    return script_of(small_plan(path, **options), python)


def script_of(plan: RunPlan, python: str = "/opt/python") -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", python)
        return render_script(placed(plan))


def placed(plan: RunPlan) -> PlacedTrial:
    return PlacedTrial(plan=plan, layout=plan_layout(plan), directory=TrialDirectory(plan.trial.directory))


def options_of(plan: RunPlan) -> list[str]:
    return sbatch_options(placed(plan))


LAUNCH = {"partition": "debug", "time_limit": "1:00:00", "extra_sbatch_arguments": ["--licenses=a:1"]}
HETJOB = with_group(small_plan("/s/my runs/it's 100%", gpu=1, launch=LAUNCH), "model_worker", partition="big")
ELASTIC = with_elastic_server(small_plan(gpu=1), gpu=1, partition="spot", time_limit="30")


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("packed.sbatch", small_plan(launch=LAUNCH)),
        ("packed-gpus.sbatch", small_plan(gpu=2, gpu_type="a100", launch={"exclude": "n7", "nodelist": "n[1-2]"})),
        ("packed-whole-nodes.sbatch", small_plan(gpu=1, cluster={"gpu_request": "none"})),
        ("hetjob.sbatch", HETJOB),
        ("jobs-head.sbatch", small_plan(gpu=1, launch=LAUNCH | {"layout": "jobs"})),
    ],
)
def test_the_script_of_a_trial_is_known_to_the_byte(name: str, plan: RunPlan) -> None:
    script = script_of(plan)
    check_golden(name, script)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=120, capture_output=True)


@pytest.mark.parametrize(
    ("name", "plan", "allocation"),
    [
        ("jobs-group.options", small_plan(gpu=1, launch=LAUNCH | {"layout": "jobs"}), 1),
        ("elastic-worker.options", ELASTIC, 1),
    ],
)
def test_the_options_of_an_extra_job_are_known_to_the_byte(name: str, plan: RunPlan, allocation: int) -> None:
    options = extra_job_options(placed(plan), allocation, exclude_nodes=["n3"])
    check_golden(name, "\n".join(options) + "\n")


def check_golden(name: str, text: str) -> None:
    """Compares with tests/golden; CORRAL_WRITE_GOLDEN=1 writes the file instead, to be looked at in the diff."""
    path = GOLDEN / name
    if os.environ.get("CORRAL_WRITE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs"


def test_the_command_that_is_shown_can_be_pasted() -> None:
    command = submission_command(TrialDirectory(HETJOB.trial.directory))
    assert command == "sbatch --parsable '/s/my runs/it'\"'\"'s 100%/trial.sbatch'"


def test_the_job_carries_who_it_belongs_to() -> None:
    plan = small_plan()
    (comment,) = [option for option in options_of(plan) if option.startswith("--comment=")]
    assert json.loads(comment.removeprefix("--comment=")) == {
        "corral": 1,
        "trial_uuid": plan.trial.uuid,
        "directory": "/s/exp/trial",
        "allocation": "head",
    }


def test_a_successor_leaves_out_nodes_that_failed_beside_those_of_the_user() -> None:
    def of(plan: RunPlan, *nodes: str) -> list[str]:
        return successor_options(plan_layout(plan), after="7", exclude_nodes=nodes)

    after = "--dependency=afterany:7"
    plan = small_plan(launch={"exclude": "n[7-8]"})
    assert of(plan) == [after]
    assert of(plan, "n2", "n3", "n2") == [after, "--exclude=n[7-8],n2,n3"]
    hetjob = with_group(HETJOB, "model_worker", partition="big", exclude="n9")
    assert of(hetjob, "n2") == [after, "--exclude=n2", ":", after, "--exclude=n9,n2"]
    assert of(ELASTIC, "n2") == [after, "--exclude=n2"]  # extra jobs are asked for by the attempt that follows


@pytest.mark.parametrize(
    ("request_by", "option"),
    [("gres", "--gres=gpu:3"), ("gpus", "--gpus-per-node=3"), ("none", "--exclusive")],
)
def test_gpus_are_asked_for_as_the_site_gives_them_out(request_by: str, option: str) -> None:
    options = options_of(small_plan(gpu=1, cluster={"gpu_request": request_by}))
    assert [one for one in options if "gpu" in one or "exclusive" in one] == [option]


def test_a_percent_sign_in_the_path_reaches_sbatch_doubled() -> None:
    assert "--output=/s/100%%j/trial/logs/slurm-%j.log" in options_of(small_plan("/s/100%j/trial"))


@pytest.mark.parametrize("name", ["a\nb", "a b", "a/b", "$(x)", "-x", ""])
def test_a_job_name_is_plain(name: str) -> None:
    with pytest.raises(ValueError, match="trial name"):
        job_name("exp", name)


def test_a_long_job_name_keeps_the_part_that_tells_allocations_apart() -> None:
    name = job_name("e" * 60, "t" * 60, "generation_server/11")
    assert len(name) == 64 and name.endswith(".generation_server-11")


@pytest.mark.parametrize("path", ["/tmp/a\n#SBATCH --exclusive", "/tmp/\x1b[2J", "/tmp/a\rb"])
def test_a_path_with_control_characters_never_becomes_a_script(path: str) -> None:
    with pytest.raises(ValueError, match="control character"):
        render(path)
    with pytest.raises(ValueError, match="control character"):
        render_extra_job(TrialDirectory(Path(path)))


def test_a_backslash_that_slurm_would_drop_from_the_log_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="drops a backslash"):
        render("/scratch/back\\slash")


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
    "# comment",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_paths_reach_the_supervisor_as_they_are(name: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "trial.sbatch"
    script.write_text(render(f"/scratch/{name}", python=str(python)))
    said = subprocess.run(["bash", str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True)
    assert said.stdout.splitlines() == ["-P", "-m", "corral.launcher.supervisor", "--trial", f"/scratch/{name}"]
    assert not (tmp_path / "canary").exists()


PRINTABLE = st.text(
    st.characters(exclude_categories=("C", "Z"), exclude_characters="\\") | st.sampled_from(" '\"$`;&|<>(){}#%!*?~"),
    min_size=1,
)


@settings(max_examples=20, deadline=None)
@given(PRINTABLE)
def test_every_printable_path_gives_scripts_that_bash_can_parse(name: str) -> None:
    for script in (render(f"/scratch/{name}"), render_extra_job(TrialDirectory(Path(f"/scratch/{name}")))):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=120, capture_output=True)


@given(st.lists(PRINTABLE | st.just("back\\slash\\"), min_size=1, max_size=5))
def test_every_option_stays_on_a_line_of_its_own_and_can_be_read_back(values: list[str]) -> None:
    lines = sbatch_lines([f"--comment={value}" for value in values]).split("\n")
    assert [unquoted(line.removeprefix("#SBATCH --comment=")) for line in lines] == values


def unquoted(text: str) -> str:
    """As sbatch reads a value: between double quotes a backslash makes the next character literal."""
    if not text.startswith('"'):
        assert not re.search(r"[\s\"'\\#;$`]", text), f"{text!r} needs quotes"
        return text
    read, rest = [], iter(text[1:-1])
    for character in rest:
        assert character != '"', f"{text!r} ends its quotes early"
        read.append(next(rest) if character == "\\" else character)
    return "".join(read)


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
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "SLURM_JOB_ID=7" in said.stdout
    kept = {line.partition("=")[0] for line in said.stdout.splitlines() if line.startswith(("SLURM_", "SRUN_"))}
    assert kept == {"SLURM_JOB_ID"}


OWN_TEMPLATE = """\
#!/bin/bash
# ours: <% directory | comment_text %>
<% sbatch_lines %>
module load cuda
exec <% supervisor %>
"""


def test_a_site_may_bring_its_own_template(tmp_path: Path) -> None:
    template = tmp_path / "own.j2"
    template.write_bytes(OWN_TEMPLATE.replace("\n", "\r\n").encode())
    script = render("/scratch/it's", launch={"sbatch_template": template})
    lines = script.split("\n")
    assert lines[:2] == ["#!/bin/bash", "# ours: /scratch/it's"]
    assert "#SBATCH --nodes=1" in lines and "\r" not in script
    assert lines[-3:] == [
        "module load cuda",
        "exec /opt/python -P -m corral.launcher.supervisor --trial '/scratch/it'\"'\"'s'",
        "",
    ]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("<% supervisor %>", "<% supervisr %>", ["supervisr", "variables are sbatch_lines, supervisor"]),
        ("<% supervisor %>", "<%% if %%>", ["line 5"]),
        ("exec <% supervisor %>", "exec true", ["never becomes the supervisor"]),
        ("exec", "if exec", ["bash cannot parse it"]),
        ("#!/bin/bash\n", "", ["no #! line"]),
        ("<% sbatch_lines %>\nmodule load cuda", "module load cuda\n<% sbatch_lines %>", ["before its first command"]),
    ],
)
def test_a_template_that_makes_no_script_is_refused_before_submission(
    old: str, new: str, words: list[str], tmp_path: Path
) -> None:
    template = tmp_path / "own.j2"
    template.write_text(OWN_TEMPLATE.replace(old, new))
    with pytest.raises(ConfigError) as refused:
        render(launch={"sbatch_template": template})
    assert all(word in str(refused.value) for word in [*words, str(template)]), str(refused.value)
    assert refused.value.problems[0].path == ("launch", "sbatch_template")


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.j2: cannot be read"):
        render(launch={"sbatch_template": tmp_path / "nowhere.j2"})


def quick_extra_job(directory: TrialDirectory, *, silence_s: float = 1) -> str:
    script = render_extra_job(directory)
    return script.replace("> 120)", f"> {silence_s})").replace("sleep 5", "sleep 0.1")


def test_an_extra_job_ends_by_itself_once_its_supervisor_is_silent(tmp_path: Path) -> None:
    directory = TrialDirectory(tmp_path / "it's a $(trial)")
    directory.control_path.mkdir(parents=True)
    alive = directory.control_path / "supervisor-alive"
    with subprocess.Popen(["bash", "-c", quick_extra_job(directory)], stdout=subprocess.PIPE, text=True) as extra_job:
        for _ in range(25):  # longer than the silence that it allows
            alive.touch()
            time.sleep(0.1)
        assert extra_job.poll() is None
        said, _ = extra_job.communicate(timeout=120)
    assert extra_job.returncode == 0 and str(alive) in said


def test_an_extra_job_gives_its_nodes_back_at_once_when_it_is_cancelled(tmp_path: Path) -> None:
    script = quick_extra_job(TrialDirectory(tmp_path), silence_s=600).replace("sleep 0.1", "sleep 600")
    with subprocess.Popen(["bash", "-c", script], start_new_session=True) as extra_job:
        time.sleep(0.3)
        extra_job.terminate()
        assert extra_job.wait(timeout=120) == 0


def test_a_signal_that_comes_before_anybody_listens_does_not_end_the_script() -> None:
    script = (GOLDEN / "packed.sbatch").read_text()
    before, separator, _ = script.rpartition("\nexec ")
    early = f"{before}{separator}sh -c 'kill -USR2 $$; echo still there'\n"
    ended = subprocess.run(["bash", "-c", early], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "still there\n"), ended
