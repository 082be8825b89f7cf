"""rl-doctor's judgements: what a site's settings and a node's answers mean; and a machine without SLURM."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from corral.launcher.doctor.look import (
    Finding,
    ProbeOutcome,
    file_system_of,
    judge_commands,
    judge_config,
    judge_limits,
    judge_partitions,
    judge_probe,
    judge_version,
    look_here,
    render,
    seconds_of,
    worst,
)
from corral.launcher.doctor.node import DISTRIBUTION
from corral.launcher.slurm.parse import parse_nodes

BIN = Path(sys.executable).parent
GOOD = {
    "SLURM_VERSION": "23.02.7",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "MinJobAge": "300 sec",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CORE_MEMORY",
    "JobRequeue": "1",
    "AuthInfo": "(null)",
    "PreemptType": "preempt/none",
    "EnforcePartLimits": "ALL",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "bf_interval=60",
    "SlurmdTimeout": "300 sec",
    "KillWait": "30 sec",
    "GresTypes": "gpu",
}


def by_check(findings: Any) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_a_usual_site_is_fine() -> None:
    findings = by_check(judge_config(GOOD))
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert "120 s" in findings["config.requeue"].said  # SLURM's own default where the site says nothing
    assert "60 s" in findings["config.backfill"].said


@pytest.mark.parametrize(
    ("setting", "value", "check", "level", "word"),
    [
        ("SLURM_VERSION", "20.02.3", "slurm.version", "fail", "--exact"),
        ("SLURM_VERSION", "21.08.8", "slurm.version", "warn", "21.08.8"),
        ("SLURM_VERSION", "25.05.1", "slurm.version", "ok", "25.05.1"),
        ("SLURM_VERSION", "master", "slurm.version", "warn", "SLURM master"),
        ("AccountingStorageType", "accounting_storage/none", "config.accounting", "ok", "off"),
        ("MinJobAge", "2 sec", "config.min_job_age", "warn", "2 s"),
        ("SelectType", "select/linear", "config.select", "warn", "whole nodes"),
        ("SelectType", "select/cons_res", "config.select", "warn", "cons_res"),
        ("SelectTypeParameters", "CR_CORE", "config.select", "warn", "memory"),
        ("JobRequeue", "0", "config.requeue", "ok", "JobRequeue=0"),
        ("AuthInfo", "socket=/x,cred_expire=5", "config.requeue", "ok", "after 5 s"),
        ("PreemptType", "preempt/partition_prio", "config.preemption", "ok", "partition_prio"),
        ("EnforcePartLimits", "NO", "config.limits", "ok", "never start"),
        ("SchedulerType", "sched/builtin", "config.backfill", "warn", "heterogeneous"),
        ("SlurmdTimeout", "3600 sec", "config.node_timeout", "warn", "3600"),
    ],
)
def test_each_setting_has_its_judgement(setting: str, value: str, check: str, level: str, word: str) -> None:
    findings = by_check(judge_config(GOOD | {setting: value}))
    assert findings[check].level == level and word in findings[check].said
    assert level == "ok" or findings[check].advice
    assert all(finding.level == "ok" for name, finding in findings.items() if name != check)


def test_a_controller_that_says_nothing_is_no_reason_to_crash() -> None:
    assert judge_version("").level == "warn"
    assert len(list(judge_config({}))) == len(list(judge_config(GOOD)))


PARTITIONS = {
    "gpu": {"State": "UP", "MaxTime": "2-00:00:00", "DefaultTime": "01:00:00", "PreemptMode": "OFF"},
    "long": {"State": "UP", "MaxTime": "UNLIMITED", "DefaultTime": "NONE", "PreemptMode": "REQUEUE"},
    "old": {"State": "DOWN", "MaxTime": "1:00:00"},
}
NODES = parse_nodes(
    "n1|gpu*|64|512000|gpu:a100:8|(null)|idle|2-00:00:00\n"
    "n2|gpu*|64|512000|gpu:a100:8|(null)|drain|2-00:00:00\n"
    "n1|long|64|512000|gpu:a100:8|(null)|idle|infinite\n"
)


def test_partitions_show_what_they_offer() -> None:
    findings = by_check(judge_partitions(NODES, PARTITIONS, GOOD))
    assert findings["partition.gpu"].level == "ok"
    assert "1 of 2 nodes up, 1 x (64 CPUs 500 GB 8 x a100)" in findings["partition.gpu"].said
    assert "never backfilled" in findings["partition.long"].advice and "REQUEUE" in findings["partition.long"].said
    assert "is DOWN" in findings["partition.old"].said


def test_a_cluster_without_gpus_or_default_partition_is_told() -> None:
    bare = parse_nodes("c1|cpu|64|512000|(null)|(null)|idle|infinite\n")
    findings = by_check(judge_partitions(bare, {"cpu": PARTITIONS["gpu"]}, GOOD | {"GresTypes": "(null)"}))
    assert "no GRES" in findings["partitions.gpus"].said and "gpu_request" in findings["partitions.gpus"].advice
    assert "launch.partition" in findings["partitions"].advice


def answer(rank: int, **changes: Any) -> dict[str, Any]:
    said = {
        "node": f"n{rank + 1}",
        "rank": rank,
        "python": sys.version.split()[0],
        "corral": version(DISTRIBUTION),
        "uid": os.getuid(),
        "canary": {"text": "x", "mode": 0o600, "owner": os.getuid()},
        "runtimes": [],
        "redis": "/usr/bin/redis-server",
        "address": "10.0.0.1",
    }
    return said | ({"peer_token": "x", "peer_offset_s": 0.01} if rank else {}) | changes


def judged(*answers: dict[str, Any], runtime: str | None = None, **outcome: Any) -> dict[str, Finding]:
    made = ProbeOutcome(
        num_nodes=len(answers), answers={said["rank"]: said for said in answers}, login_offset_s=0.0, waited_s=0.5
    )
    for name, value in outcome.items():
        setattr(made, name, value)
    return by_check(judge_probe(made, fileroot=Path("/scratch/me"), runtime=runtime))


def test_two_nodes_that_answer_are_fine() -> None:
    findings = judged(answer(0), answer(1))
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert "n2 reaches a port of n1" in findings["nodes.ports"].said


@pytest.mark.parametrize(
    ("rank", "changes", "check", "level", "word"),
    [
        (0, {"canary": {"text": "x", "mode": 0o644, "owner": 0}}, "nodes.ownership", "fail", "0644"),
        (0, {"uid": 65534}, "nodes.ownership", "fail", "65534"),
        (1, {"python": "3.9.2"}, "nodes.python", "fail", "n2 has Python 3.9.2"),
        (1, {"corral": "0.0.1"}, "nodes.python", "fail", "corral 0.0.1"),
        (0, {"slurm_error": "scontrol was not found on PATH"}, "nodes.slurm", "fail", "scontrol"),
        (0, {"redis_error": "no redis-server >= 6.2"}, "nodes.redis", "fail", "redis-server"),
        (1, {"sandbox_error": "there is no bwrap in the PATH"}, "nodes.sandbox", "warn", "n2: there is no bwrap"),
        (0, {"bind_error": "10.0.0.1: refused"}, "nodes.ports", "fail", "cannot listen"),
        (1, {"peer_error": "timed out"}, "nodes.ports", "fail", "n2 does not reach"),
        (1, {"peer_offset_s": -75.0}, "nodes.clocks", "warn", "75 s"),
    ],
)
def test_each_answer_of_a_node_has_its_judgement(
    rank: int, changes: dict[str, Any], check: str, level: str, word: str
) -> None:
    said = {0: answer(0), 1: answer(1)}
    said[rank] |= changes
    findings = judged(*said.values())
    assert findings[check].level == level and word in findings[check].said and findings[check].advice


def test_a_missing_container_runtime_is_told_before_a_trial_needs_it() -> None:
    assert judged(answer(0), runtime="apptainer")["nodes.containers"].level == "fail"
    assert judged(answer(0, runtimes=["apptainer"]), runtime="apptainer")["nodes.containers"].level == "ok"
    assert judged(answer(0, runtimes=["singularity"]), runtime="singularity")["nodes.containers"].level == "ok"
    assert judged(answer(0, runtimes=["singularity"]), runtime="apptainer")["nodes.containers"].level == "fail"


def test_a_login_node_that_reaches_no_port_is_a_warning() -> None:
    findings = judged(answer(0), login_error="10.0.0.1:2000: timed out", login_offset_s=None)
    assert findings["login.ports"].level == "warn"


@pytest.mark.parametrize(
    ("outcome", "check", "level", "word"),
    [
        ({"exit_code": 41, "state": "FAILED"}, "nodes.fileroot", "fail", "/scratch/me is not seen"),
        ({"exit_code": 42, "state": "FAILED", "logs": {0: "No module named corral"}}, "nodes.python", "fail", "No mod"),
        ({"state": "PENDING", "reason": "Resources", "waited_s": 60.0}, "nodes", "warn", "60 s (Resources)"),
        ({"state": "NODE_FAIL", "exit_code": 0}, "nodes", "fail", "NODE_FAIL"),
    ],
)
def test_a_probe_without_an_answer_says_why(outcome: dict[str, Any], check: str, level: str, word: str) -> None:
    findings = judged(**outcome)
    assert findings[check].level == level and word in findings[check].said and findings[check].advice


def test_a_node_that_keeps_silent_is_missed() -> None:
    findings = judged(answer(0), num_nodes=2, logs={1: "bash: python: cannot execute"})
    assert "[1] of 2" in findings["nodes.all"].said and "cannot execute" in findings["nodes.all"].said


@pytest.mark.parametrize(("text", "seconds"), [("300 sec", 300), ("5 min", 300), ("01:00:00", 3600), ("(null)", None)])
def test_times_of_slurm_conf_are_read(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


def test_the_innermost_mount_counts(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    inner = str(tmp_path / "a b").replace(" ", "\\040")
    mounts = f"dev / ext4 rw 0 0\nserver:/x {inner} nfs4 rw 0 0\nnone {tmp_path}/a tmpfs rw 0 0\n"
    assert file_system_of(tmp_path / "a b", mounts=mounts) == "nfs4"
    assert file_system_of(tmp_path / "abc", mounts=mounts) == "ext4"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert by_check(look_here(tmp_path / "file" / "root"))["fileroot"].level == "fail"


def test_a_broken_profile_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "corral").mkdir()
    (tmp_path / "corral" / "profile.yaml").write_text("launch:\n  partition: gpu\nname: mine\n")
    finding = by_check(look_here(tmp_path))["profile"]
    assert finding.level == "fail" and "profile.yaml:3" in finding.said


def test_sglang_is_told_with_its_version_and_does_not_have_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = by_check(look_here(tmp_path))["sglang"]
    assert finding.level == "ok" and re.search(r"SGLang \d+\.\d+.*/\.venv-sglang/bin/python", finding.said)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    finding = by_check(look_here(tmp_path))["sglang"]
    assert finding.level == "ok" and "none" in finding.said and "make sglang" in finding.said


def test_verifiers_does_not_have_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    finding = by_check(look_here(tmp_path))["environments"]
    assert finding.level == "ok" and "none" in finding.said and "make environments" in finding.said


def test_whether_sandboxes_can_be_made_is_told_and_they_do_not_have_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert by_check(look_here(tmp_path))["sandbox"].level == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = by_check(look_here(tmp_path))["sandbox"]
    assert finding.level == "warn" and "no bwrap in the PATH" in finding.said


def test_hard_limits_that_end_a_worker_are_told_with_their_numbers() -> None:
    program = "from corral.experiments.trial.login_shell import low_hard_limits; print(*low_hard_limits(), sep=';')"
    command = f'ulimit -t 900 -n 512; exec "{sys.executable}" -c "{program}"'
    low = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60).stdout.strip().split(";")
    assert {"900 s of CPU time (ulimit -t)", "512 open files (ulimit -n)"} <= set(low)
    finding = judge_limits("limits", low)
    assert finding.level == "warn" and "900 s of CPU time" in finding.said
    assert judge_limits("limits", []).level == "ok"


def test_some_commands_missing_is_worse_than_all() -> None:
    assert judge_commands(["sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol"]).level == "warn"
    assert judge_commands(["sbatch"]).level == "fail"


def test_a_machine_without_slurm_is_checked_for_local_trials(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for program in ("sh", "env"):
        (tmp_path / "bin" / program).symlink_to(shutil.which(program) or "/bin/false")
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), "CORRAL_FILEROOT": str(tmp_path / "root")}
    command = [str(BIN / "rl-doctor"), "-o", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = {one["check"]: one for one in json.loads(done.stdout)}
    assert "only --local" in said["slurm.commands"]["said"] and said["redis"]["level"] == "ok"
    assert list((tmp_path / "root").iterdir()) == []


def test_what_local_trials_need_is_checked_without_asking_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    for program in ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol"):
        (tmp_path / program).write_text("#!/bin/sh\necho there is no cluster >&2; exit 1\n")
        (tmp_path / program).chmod(0o700)
    environment = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin", "CORRAL_FILEROOT": str(tmp_path / "root")}
    command = [str(BIN / "rl-doctor"), "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "there is no cluster" in done.stdout
    done = subprocess.run([*command, "--local"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "slurm" not in done.stdout, done.stdout


def test_what_is_to_be_done_stands_below_what_is_wrong() -> None:
    findings = [
        Finding(check="redis", level="ok", said="Redis 7"),
        Finding(check="fileroot", level="fail", said="/x is full", advice="delete something"),
    ]
    assert render(findings).splitlines() == [
        "ok    redis     Redis 7",
        "fail  fileroot  /x is full",
        "                -> delete something",
        "",
        "1 ok  0 warn  1 fail",
    ]
    assert worst(findings) == "fail" and worst(findings[:1]) == "ok"
