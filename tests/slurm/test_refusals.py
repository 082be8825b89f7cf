"""What this cluster can never run is refused before sbatch: with the key, its line, the numbers and a way out."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from corral.experiments.errors import ConfigError
from corral.launcher.slurm.client import SlurmUnreachableError
from corral.launcher.submit import prepare
from corral.launcher.trial.processes import user_name
from tests.experiments.broken_yaml import write_inputs
from tests.launcher.trials import wait_until
from tests.slurm.cluster import Cluster, slurm_version
from tests.slurm.conftest import Ended
from tests.slurm.wrong_configurations import (
    CAN_NEVER_RUN,
    NAME_CASES,
    OPTION_CASES,
    REFUSED_CASES,
    SIZE_CASES,
    VALID_SLURM,
    RefusedCase,
)

pytestmark = pytest.mark.slurm

RL_SUBMIT = Path(sys.executable).parent / "rl-submit"


def _prepare(file: Path, *overrides: str) -> prepare.Submission:
    where = f"cluster.fileroot={file.parent / 'trials'}"
    return prepare.prepare(file, [*overrides, where], trial_name="t", mode="slurm")


def is_queued(cluster: Cluster, job_id: str) -> bool:
    return bool(cluster.run("squeue", "-h", "-j", job_id, "-t", "PD,R,CG").stdout.strip())


def node_states(cluster: Cluster) -> set[str]:
    return set(cluster.run("sinfo", "-h", "-N", "-o", "%t").stdout.split())


@pytest.fixture
def experiment(cluster: Cluster, tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    path = tmp_path / "experiment.yaml"
    path.write_text(VALID_SLURM)
    return path


@pytest.mark.parametrize("case", REFUSED_CASES, ids=lambda case: case.name)
def test_what_can_never_run_is_refused_with_key_line_and_remedy(
    case: RefusedCase, cluster: Cluster, tmp_path: Path
) -> None:
    file = case.write(tmp_path)
    with pytest.raises(ConfigError) as refused:
        _prepare(file, *case.overrides)
    text = str(refused.value)
    missing = [word for word in case.words if word.lower() not in text.lower()]
    assert not missing, f"{missing} not in:\n{text}"
    assert refused.value.exit_code == case.exit_code, text
    assert all(problem.hint and problem.path and problem.place for problem in refused.value.problems), text
    if case.line is not None:
        assert f"experiment.yaml:{case.line} " in text, text
    assert len(text.splitlines()) <= 24
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize(
    "case",
    [case for case in (*NAME_CASES, *SIZE_CASES[:6:5], *OPTION_CASES[:3]) if case.exit_code == CAN_NEVER_RUN],
    ids=lambda case: case.name,
)
def test_the_last_line_of_a_refusal_is_a_command_that_shows_the_evidence(
    case: RefusedCase, cluster: Cluster, tmp_path: Path
) -> None:
    file = case.write(tmp_path)
    with pytest.raises(ConfigError) as refused:
        _prepare(file, *case.overrides)
    _, separator, command = str(refused.value).splitlines()[-1].partition("checked with: ")
    assert separator, str(refused.value)
    shown = cluster.run(*shlex.split(command))
    if command.startswith("sbatch"):
        assert shown.returncode != 0 and "--test-only" in command
        assert all(word in str(refused.value) for word in shown.stderr.split()[:4]), (shown.stderr, str(refused.value))
    else:
        assert shown.returncode == 0 and shown.stdout.strip(), shown


@pytest.mark.parametrize("case", REFUSED_CASES[::25], ids=lambda case: case.name)
def test_rl_submit_refuses_with_one_message_on_stderr_and_submits_nothing(
    case: RefusedCase, cluster: Cluster, tmp_path: Path
) -> None:
    file = case.write(tmp_path)
    overrides = (part for override in case.overrides for part in ("-s", override))
    refused = subprocess.run(
        [str(RL_SUBMIT), str(file), "--fileroot", str(tmp_path / "trials"), *overrides],
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == case.exit_code, refused.stderr
    assert refused.stdout == "" and refused.stderr.startswith("error: ") and "Traceback" not in refused.stderr
    assert not (tmp_path / "trials").exists()


def test_a_refusal_imports_neither_torch_nor_transformers(experiment: Path) -> None:
    program = (
        "import sys\n"
        "from corral.launcher.commands.submit import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "print(code, *sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'transformers', 'numpy'}))\n"
    )
    arguments = [str(experiment), "-s", "launch.partition=nosuch"]
    run = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["5"], run.stdout + run.stderr


def test_all_wrong_names_are_told_at_once(experiment: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        _prepare(experiment, "launch.partition=nosuch", "launch.exclude=n9", "launch.reservation=none")
    assert [problem.path for problem in refused.value.problems] == [
        ("launch", "partition"),
        ("launch", "exclude"),
        ("launch", "reservation"),
    ]


def test_a_wrong_value_of_a_profile_is_found_in_the_profile(experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("launch:\n  qos: any\n  partition: h100\n")
    with pytest.raises(ConfigError, match=r"site\.yaml:3  launch\.partition: h100"):
        prepare.prepare(experiment, [], trial_name="t", mode="slurm", profile=str(tmp_path / "site.yaml"))


def test_an_override_is_quoted_as_it_was_typed(experiment: Path) -> None:
    with pytest.raises(ConfigError, match=r"-s groups\.rollout_worker\.count=400  groups\.rollout_worker\.count: 400"):
        _prepare(experiment, "groups.rollout_worker.count=400")


def test_a_trial_that_fits_is_planned_on_the_nodes_that_there_are(experiment: Path) -> None:
    submission = _prepare(experiment)
    assert submission.layout is not None and submission.layout.head.num_nodes == 1
    assert "partition debug ok" in submission.checks
    assert any(check.endswith("of 4 nodes idle") for check in submission.checks)
    assert any(check.startswith("est. start ") for check in submission.checks)
    assert not (experiment.parent / "trials").exists()


def test_what_only_may_go_wrong_is_a_warning(experiment: Path) -> None:
    submission = _prepare(experiment, "launch.time_limit=null", "launch.account=lab", "launch.qos=low")
    said = "\n".join(submission.warnings)
    assert "backfill" in said and "account 'lab' has no effect" in said and "qos 'low' has no effect" in said
    assert "is below /tmp" in said or not str(experiment).startswith("/tmp")
    assert "backfill" not in "\n".join(_prepare(experiment).warnings)


def test_sites_that_hide_their_nodes_do_not_block_a_submission(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sinfo").write_text("#!/bin/sh\necho 'sinfo: error: not permitted' >&2\nexit 1\n")
    (folder / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    submission = _prepare(experiment)
    assert any("could not be checked" in warning and "not permitted" in warning for warning in submission.warnings)
    with pytest.raises(ConfigError, match="SLURM refuses"):
        _prepare(experiment, "launch.partition=nosuch")


def test_sinfo_is_asked_for_the_partitions_that_are_named_and_for_all_only_to_say_what_would_do(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = tmp_path / "bin", tmp_path / "asked"
    folder.mkdir()
    (folder / "sinfo").write_text(f'#!/bin/sh\necho "$*" >>{asked}\nexec {shutil.which("sinfo")} "$@"\n')
    (folder / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def partitions() -> list[str]:
        lines = asked.read_text().splitlines()
        asked.unlink()
        return [line.partition("-p ")[2].partition(" ")[0] for line in lines]

    _prepare(experiment, "launch.partition=spot")
    assert partitions() == ["spot"]
    _prepare(experiment, "launch.time_limit=1", "launch.signal_before_end_s=20", "launch.partition=short,spot")
    assert partitions() == ["short,spot"]
    _prepare(experiment)
    assert partitions() == ["debug"]
    with pytest.raises(ConfigError, match="MaxNodes 1 for a job|'debug' fits|'spot' fits|partition 'debug'"):
        _prepare(experiment, "launch.partition=short", "launch.time_limit=1:00:00")
    assert partitions() == ["short", ""]
    _prepare(
        experiment,
        "launch.partition=short",
        "launch.time_limit=1",
        "launch.signal_before_end_s=20",
        "launch.exclude=n2",
    )
    assert partitions() == ["short", ""]  # n2 is a node, though none of that partition


@pytest.mark.parametrize(("image", "is_refused"), [("/no/such.sif", True), ("docker://alpine", False)])
def test_an_image_that_is_not_there_is_refused(experiment: Path, image: str, is_refused: bool) -> None:
    overrides = ("cluster.container_runtime=apptainer", f"groups.rollout_worker.scheduling.container_image={image}")
    if not is_refused:
        assert _prepare(experiment, *overrides).layout is not None
        return
    with pytest.raises(ConfigError, match=r"there is no image /no/such\.sif") as refused:
        _prepare(experiment, *overrides)
    assert refused.value.problems[0].path == ("groups", "rollout_worker", "scheduling", "container_image")


def test_a_cluster_that_does_not_answer_is_no_fault_of_the_configuration(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmUnreachableError):
        _prepare(experiment)


@contextmanager
def _reserved_for_others(cluster: Cluster) -> Iterator[None]:
    """Node n4, as 'workshop'."""
    created = cluster.run(
        "scontrol", "create", "reservation", "reservationname=workshop", "starttime=now", "duration=5", "nodes=n4",
        "users=nobody",
    )  # fmt: skip
    assert created.returncode == 0, created.stderr
    try:
        yield
    finally:
        cluster.run("scontrol", "delete", "reservation=workshop")


def test_a_reservation_of_others_is_refused_by_slurm_and_named(experiment: Path, cluster: Cluster) -> None:
    with _reserved_for_others(cluster):
        with pytest.raises(ConfigError, match="did you mean 'workshop'"):
            _prepare(experiment, "launch.reservation=worksop")
        if os.getuid() == 0 and slurm_version() >= (23, 11):  # which lets root into every reservation
            assert _prepare(experiment, "launch.reservation=workshop").layout is not None
            return
        with pytest.raises(ConfigError, match=r"(?s)SLURM refuses.*launch\.reservation: workshop"):
            _prepare(experiment, "launch.reservation=workshop")


def test_a_node_in_somebody_elses_reservation_is_waited_for(experiment: Path, cluster: Cluster) -> None:
    """`sbatch --test-only` refuses what sbatch queues, in the sentence that it has for nodes that are too small."""
    with _reserved_for_others(cluster):
        submission = _prepare(experiment, "launch.nodelist=n4")
        (told,) = [warning for warning in submission.warnings if "in reservation 'workshop' until" in warning]
        assert "0 of n4" in told and not any("SLURM refuses" in warning for warning in submission.warnings)
        queued = cluster.run("sbatch", "--parsable", "--nodelist=n4", "--time=60", "--wrap=true")
        assert queued.returncode == 0, queued.stderr
        cluster.run("scancel", queued.stdout.strip())


@pytest.mark.parametrize("state", ["drain", "down"])
def test_nodes_that_are_away_are_a_warning_and_slurm_queues_the_trial(
    experiment: Path, cluster: Cluster, state: str
) -> None:
    """As before a maintenance, or after a controller's restart: whoever submits now is the first in the queue."""
    cluster.run("scontrol", "update", "nodename=n[1-4]", f"state={state}", "reason=maintenance")
    try:
        submission = _prepare(experiment)
        said = "\n".join(submission.warnings)
        assert f"0 of partition 'debug' are up at present (4 {state}" in said and "sinfo -R" in said, said
        assert "SLURM refuses" not in said
    finally:
        cluster.run("scontrol", "update", "nodename=n[1-4]", "state=resume")
        wait_until(lambda: node_states(cluster) == {"idle"}, "all nodes to be idle again")


def test_a_partition_that_is_down_is_a_warning_and_one_that_takes_no_jobs_is_refused(
    experiment: Path, cluster: Cluster
) -> None:
    try:
        cluster.run("scontrol", "update", "partitionname=spot", "state=down")
        waits = _prepare(experiment, "launch.partition=spot")
        assert "partition spot is DOWN" in "\n".join(waits.warnings)
        assert not any(check.startswith("est. start") for check in waits.checks), waits.checks
        cluster.run("scontrol", "update", "partitionname=spot", "state=drain")
        with pytest.raises(ConfigError, match=r"(?s)partition 'spot' is DRAIN: it takes no jobs.*debug, short"):
            _prepare(experiment, "launch.partition=spot")
    finally:
        cluster.run("scontrol", "update", "partitionname=spot", "state=up")


def test_a_reservation_that_begins_later_is_waited_for(experiment: Path, cluster: Cluster) -> None:
    created = cluster.run(
        "scontrol", "create", "reservation", "reservationname=course", "starttime=now+1hour", "duration=60",
        "nodes=n[1-2]", f"users={user_name()}",
    )  # fmt: skip
    assert created.returncode == 0, created.stderr
    try:
        submission = _prepare(experiment, "launch.reservation=course")
        told = [warning for warning in submission.warnings if "'course' begins at " in warning]
        assert len(told) == 1 and "Invalid time" not in "\n".join(submission.warnings), submission.warnings
    finally:
        cluster.run("scontrol", "delete", "reservation=course")


def test_without_checks_slurm_alone_decides(
    experiment: Path, cluster: Cluster, tmp_path: Path, rl_submit: Callable[..., Ended]
) -> None:
    impossible = [str(experiment), "--fileroot", str(tmp_path / "trials"), "-n", "t"]
    impossible += ["-s", "launch.partition=short", "-s", "launch.time_limit=10"]
    assert rl_submit(*impossible).returncode == CAN_NEVER_RUN
    submitted = rl_submit(*impossible, "--no-checks")
    assert submitted.returncode == 0, submitted.stderr
    assert "cluster not checked (--no-checks)" in submitted.stdout
    job_id = re.search(r"^job +(\d+)", submitted.stdout, re.MULTILINE)
    assert job_id is not None
    try:
        shown = cluster.run("squeue", "-h", "-j", job_id[1], "-o", "%T").stdout.strip()
        assert shown == "PENDING"
        cluster.run("scancel", job_id[1])
        wait_until(lambda: not is_queued(cluster, job_id[1]), "the end of the job that can never start")
        resume = ["--resume", str(tmp_path / "trials" / "small-grpo" / "t"), "--dry-run"]
        assert rl_submit(*resume).returncode == CAN_NEVER_RUN
        assert "cluster not checked" in rl_submit(*resume, "--no-checks").stdout
        moved = rl_submit(*resume, "--no-checks", "-s", "allocation=hf:d1+fsdp:d3")
        assert "model_worker 0-2" in moved.stdout, moved.stdout + moved.stderr
    finally:
        cluster.run("scancel", job_id[1])


def test_a_partition_may_be_closed_to_an_account(experiment: Path, cluster: Cluster) -> None:
    cluster.run("scontrol", "update", "partitionname=spot", "allowaccounts=physics,biology")
    try:
        with pytest.raises(ConfigError, match=r"not open to account 'phisics' \(it allows .*\n.*\n.*'physics'"):
            _prepare(experiment, "launch.partition=spot", "launch.account=phisics")
    finally:
        cluster.run("scontrol", "update", "partitionname=spot", "allowaccounts=ALL")
