"""SLURM's text as it really is: parsed without surprise, and every word of it has a meaning."""

import os
import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.launcher.slurm.client import (
    SlurmClient,
    SlurmError,
    SlurmUnreachableError,
    clean_environment,
    parse_job_id,
    queue_command,
)
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.slurm.parse import (
    parse_gpus,
    parse_key_values,
    parse_nodes,
    parse_settings,
    parse_steps,
)
from corral.launcher.slurm.verdict import jobs_of_squeue, judge_exit, judge_job
from corral.scheduling.slurm_formats import expand_host_list

QUEUE = (
    "12|12|RUNNING|None|2026-01-01T10:00:00|54:59|2|n[1-2]|exp.t|"
    '{"corral":1,"trial_uuid":"u","attempt":0}\n'
    "13|7+1|PENDING|Resources|N/A|1:00:00|4||other|(null)\n"
    "14|14|CANCELLED|None|N/A|1:00|1|n1|pipe|a|b|c\n"
    "broken line\n"
)


def test_squeue_lines_become_jobs_and_comments_identify_ours() -> None:
    jobs = jobs_of_squeue(QUEUE)
    assert [(job.job_id, job.word) for job in jobs] == [("12", "RUNNING"), ("13", "PENDING"), ("14", "CANCELLED")]
    assert jobs[0].tag == {"corral": 1, "trial_uuid": "u", "attempt": 0}
    assert jobs[1].tag == jobs[2].tag == {}
    assert jobs[2].name == "pipe"
    assert [job.part_of for job in jobs] == ["", "7", ""]
    assert (jobs[0].time_left, jobs[0].line) == ("54:59", QUEUE.splitlines()[0])


def test_job_ids_with_and_without_a_cluster() -> None:
    assert parse_job_id("184223\n") == parse_job_id("184223;mini\n") == "184223"
    with pytest.raises(SlurmError, match="squeue --me"):
        parse_job_id("sbatch: warning")


def test_steps_are_found_by_name_without_the_batch_step() -> None:
    assert parse_steps("7.batch|batch\n7.0|model_worker-0\n7.12|rollout_worker-3\n7.extern|extern\n") == {
        "model_worker-0": ["7.0"],
        "rollout_worker-3": ["7.12"],
    }


def test_scontrol_values_may_hold_spaces_and_equal_signs() -> None:
    line = 'JobId=7 JobName=a b Comment={"x":"y=z"} NodeList=n[1-2] ExitCode=0:0'
    values = parse_key_values(line)
    line = 'JobId=7 Comment={"directory":"/x/r n=1 State=2/t"} StdErr=/x/r n=1/log'
    assert parse_key_values(line)["Comment"] == '{"directory":"/x/r n=1 State=2/t"}'
    assert parse_key_values(line)["StdErr"] == "/x/r"
    assert values["JobName"] == "a b" and values["NodeList"] == "n[1-2]" and values["ExitCode"] == "0:0"


def test_sinfo_lines_become_nodes() -> None:
    (node, other) = parse_nodes(
        "n1|debug*|8|8000|gpu:8|(null)|idle|infinite\nn2|short|4+|64+|(null)|ib,h100|down*|1:00\n"
    )
    assert (node.name, node.partition, node.is_default_partition, node.cpus, node.gpus) == ("n1", "debug", True, 8, 8)
    assert (other.cpus, other.gpus, other.features, other.is_up) == (4, 0, ("ib", "h100"), False)


@pytest.mark.parametrize(
    ("cpus", "cores", "threads"),
    [
        ("8", "1:4:2", 2),
        ("8", "1:8:1", 1),
        ("128", "2:32:2", 2),
        ("64", "2:32:2", 1),  # the site counts cores only
        ("64", "N/A", 1),
    ],
)
def test_cpus_of_a_core_are_what_slurm_counts(cpus: str, cores: str, threads: int) -> None:
    (node,) = parse_nodes(f"n1|debug*|{cpus}|8000|gpu:8|(null)|idle|{cores}\n")
    assert node.threads_per_core == threads


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:8", {"": 8}),
        ("gpu:a100:4(S:0-1),nvme:1", {"a100": 4}),
        ("gpu:a100:4,gpu:h100:2", {"a100": 4, "h100": 2}),
        ("gpu", {"": 1}),
        ("gpu:a100", {"a100": 1}),
    ],
)
def test_gres_text_becomes_gpus_by_type(gres: str, gpus: dict[str, int]) -> None:
    assert parse_gpus(gres) == gpus


def test_host_lists_expand() -> None:
    assert expand_host_list("n[1-3,07],login,r[1-2]c[1-2]") == "n1 n2 n3 n07 login r1c1 r1c2 r2c1 r2c2".split()
    assert expand_host_list("n[08-11]") == ["n08", "n09", "n10", "n11"]
    assert expand_host_list("") == []


def test_the_environment_keeps_the_cluster_and_loses_the_enclosing_job() -> None:
    cleaned = clean_environment(
        {
            "SLURM_CONF": "/c",
            "SLURM_JOB_ID": "1",
            "SBATCH_PARTITION": "x",
            "RANK": "0",
            "PATH": "/bin",
            "MASTER_PORT": "1",
            "CORRAL_TRIAL_UUID": "of the trial that submits",
        }
    )
    assert cleaned == {"SLURM_CONF": "/c", "PATH": "/bin"}


def test_filters_of_the_users_shell_hide_no_job_and_spare_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("squeue", "scancel"):
        script = tmp_path / command
        script.write_text('#!/bin/sh\nif [ -n "$SQUEUE_PARTITION$SCANCEL_STATE$SLURM_TIME_FORMAT" ]; then exit 1; fi\n')
        script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = {"SQUEUE_PARTITION": "x", "SCANCEL_STATE": "PENDING", "SLURM_TIME_FORMAT": "relative", "USER": "nobody"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert SlurmClient().queue() == []
    SlurmClient().cancel("7")
    assert queue_command()[queue_command().index("-u") + 1] == pwd.getpwuid(os.getuid()).pw_name
    assert "-r" not in queue_command()  # an array of somebody's evaluation is one line, not one for each element


def test_a_command_that_cannot_be_run_at_the_moment_is_a_cluster_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").write_text("no program")
    (tmp_path / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnreachableError, match="squeue could not be run: .*format error"):
        SlurmClient().queue()


ROWS = [
    # word, reason, start, it has run before, its nodes are down -> state, words of the advice
    ("PENDING", "None", "N/A", False, False, "QUEUED", ""),
    ("PENDING", "Resources", "2026-01-01T14:20:00", False, False, "QUEUED", "est. start 2026-01-01T14:20:00"),
    ("PENDING", "Priority", "N/A", False, False, "QUEUED", "other jobs are before it"),
    ("PENDING", "Prolog", "N/A", False, False, "QUEUED", "prepared"),
    ("PENDING", "Licenses", "N/A", False, False, "QUEUED", "licenses"),
    ("PENDING", "BeginTime", "2026-01-01T12:00:00", True, False, "REQUEUED", "eligible at 2026-01-01T12:00:00"),
    ("PENDING", "Resources", "N/A", True, False, "REQUEUED", "resources"),
    ("PENDING", "BeginTime", "N/A", False, False, "QUEUED", "begin time"),
    ("PENDING", "Dependency", "N/A", False, False, "QUEUED", "waits for another job"),
    ("PENDING", "Reservation", "N/A", False, False, "QUEUED", "reservation"),
    ("PENDING", "JobHeldUser", "N/A", False, False, "HELD", "scontrol release 7"),
    ("PENDING", "JobHeldAdmin", "N/A", False, False, "HELD", "administrator"),
    ("PENDING", "QOSMaxCpuPerUserLimit", "N/A", False, False, "QUEUED", "launch.qos"),
    ("PENDING", "AssocGrpNodeLimit", "N/A", False, False, "QUEUED", "launch.account"),
    ("PENDING", "MaxNodePerAccount", "N/A", False, False, "QUEUED", "account"),
    ("PENDING", "SomethingNew", "N/A", False, False, "QUEUED", "man squeue"),
    ("PENDING", "PartitionNodeLimit", "N/A", False, False, "BLOCKED", "ask for less"),
    ("PENDING", "PartitionConfig", "N/A", False, False, "BLOCKED", "partition"),
    ("PENDING", "PartitionTimeLimit", "N/A", False, False, "BLOCKED", "time"),
    ("PENDING", "BadConstraints", "N/A", False, False, "BLOCKED", "constraints"),
    ("PENDING", "AccountNotAllowed", "N/A", False, False, "BLOCKED", "account"),
    ("PENDING", "InvalidAccount", "N/A", False, False, "BLOCKED", "account"),
    ("PENDING", "InvalidQOS", "N/A", False, False, "BLOCKED", "QOS"),
    ("PENDING", "DependencyNeverSatisfied", "N/A", False, False, "BLOCKED", "can no longer"),
    ("PENDING", "ReqNodeNotAvail, UnavailableNodes:n[1-2]", "N/A", False, True, "BLOCKED", "sinfo -R"),
    ("PENDING", "ReqNodeNotAvail, UnavailableNodes:n[1-2]", "N/A", False, False, "QUEUED", "UnavailableNodes:n[1-2]"),
    ("PENDING", "Nodes required for job are DOWN, DRAINED or reserved", "N/A", False, True, "BLOCKED", "are down"),
    ("PENDING", "Nodes required for job are DOWN, DRAINED or reserved", "N/A", False, False, "QUEUED", "sinfo"),
    ("PENDING", "QOSMaxWallDurationPerJobLimit", "N/A", False, False, "BLOCKED", "another launch.qos"),
    ("PENDING", "QOSMaxCpuPerJobLimit", "N/A", False, False, "BLOCKED", "a limit of the QOS for every single job"),
    ("PENDING", "AssocMaxNodePerJobLimit", "N/A", False, False, "BLOCKED", "another launch.account"),
    ("PENDING", "QOSMaxGRESPerNode", "N/A", False, False, "BLOCKED", "rl-stop"),
    ("PENDING", "QOSMinGRES", "N/A", False, False, "BLOCKED", "launch.qos"),
    ("PENDING", "QOSMaxCpuPerUserLimit", "N/A", False, False, "QUEUED", "it starts when other jobs end"),
    ("PENDING", "QOSGrpGRES", "N/A", False, False, "QUEUED", "it starts when other jobs end"),
    ("PENDING", "AssocMaxJobsLimit", "N/A", False, False, "QUEUED", "launch.account"),
    ("PENDING", "AssocGrpCPUMinutesLimit", "N/A", False, False, "QUEUED", "the site renews the budget"),
    ("PENDING", "MaxGRESPerAccount", "N/A", False, False, "QUEUED", "a limit of the account"),
    ("PENDING", "launch failed requeued held", "N/A", True, False, "HELD", "scontrol release 7"),
    ("PENDING", "JobHoldMaxRequeue", "N/A", True, False, "HELD", "too often"),
    ("SPECIAL_EXIT", "None", "N/A", False, False, "HELD", "release"),
    ("REQUEUE_HOLD", "None", "N/A", False, False, "HELD", "release"),
    ("RESV_DEL_HOLD", "None", "N/A", False, False, "HELD", "reservation"),
    ("REQUEUED", "None", "N/A", False, False, "REQUEUED", ""),
    ("REQUEUE_FED", "None", "N/A", False, False, "REQUEUED", ""),
    ("CONFIGURING", "None", "N/A", False, False, "STARTING", "prepared"),
    ("POWER_UP_NODE", "None", "N/A", False, False, "STARTING", "powered up"),
    ("RESIZING", "None", "N/A", False, False, "STARTING", ""),
    ("RUNNING", "None", "N/A", False, False, "RUNNING", ""),
    ("SUSPENDED", "None", "N/A", False, False, "SUSPENDED", "stand still"),
    ("STOPPED", "None", "N/A", False, False, "SUSPENDED", "stand still"),
    ("COMPLETING", "None", "N/A", False, False, "STOPPING", ""),
    ("SIGNALING", "None", "N/A", False, False, "STOPPING", ""),
    ("STAGE_OUT", "None", "N/A", False, False, "STOPPING", ""),
    ("COMPLETED", "None", "N/A", False, False, "FAILED", "without finishing"),
    ("FAILED", "NonZeroExitCode", "N/A", False, False, "FAILED", "slurm-JOB.log"),
    ("OUT_OF_MEMORY", "OutOfMemory", "N/A", False, False, "OOM", "`mem`"),
    ("TIMEOUT", "TimeLimit", "N/A", False, False, "TIMED_OUT", "--resume"),
    ("DEADLINE", "DeadLine", "N/A", False, False, "TIMED_OUT", "--resume"),
    ("NODE_FAIL", "NodeDown", "N/A", False, False, "NODE_FAILED", "--resume"),
    ("BOOT_FAIL", "None", "N/A", False, False, "NODE_FAILED", "--resume"),
    ("LAUNCH_FAILED", "None", "N/A", False, False, "NODE_FAILED", "--resume"),
    ("PREEMPTED", "None", "N/A", False, False, "PREEMPTED", "--resume"),
    ("REVOKED", "None", "N/A", False, False, "PREEMPTED", "--resume"),
    ("CANCELLED by 1000", "None", "N/A", False, False, "CANCELLED", "scancel"),
    ("RUNNING+NEW_FLAG", "None", "N/A", False, False, "RUNNING", ""),
    ("FUTURE_WORD", "None", "N/A", False, False, "UNKNOWN", "FUTURE_WORD"),
    ("", "", "", False, False, "UNKNOWN", "''"),
]


@pytest.mark.parametrize(("word", "reason", "start", "has_run", "down", "state", "advice"), ROWS)
def test_slurms_words_have_a_meaning_and_advice(
    word: str, reason: str, start: str, has_run: bool, down: bool, state: str, advice: str
) -> None:
    judged, note = judge_job(word, reason, start=start, has_run=has_run, nodes_are_down=down, job_id="7")
    assert judged == state
    assert advice in note


@pytest.mark.parametrize("reason", ["QOSMaxCpuPerUserLimit", "QOSGrpCpuLimit", "AssocGrpGRES", "MaxCpuPerAccount"])
def test_a_limit_that_a_job_exceeds_by_itself_is_cured_by_no_waiting(reason: str) -> None:
    said = "it asks for 6 CPUs, and QOS 'small' allows 4 in all jobs of a user (MaxTRESPU)"
    state, note = judge_job("PENDING", reason, exceeded=said)
    assert state == "BLOCKED" and said in note and "ask for less" in note
    assert judge_job("PENDING", "QOSMaxJobsPerUserLimit")[0] == "QUEUED"
    assert judge_job("PENDING", "Priority", exceeded=said)[0] == "QUEUED"


def test_a_job_that_could_not_open_its_log_says_which_folder_is_missing() -> None:
    assert "folder" in judge_exit("FAILED", "0:53")
    assert "3:0" in judge_exit("FAILED", "3:0")
    assert judge_exit("FAILED", "0:0") == judge_exit("TIMEOUT", "0:53") == judge_exit("FAILED", "") == ""


def test_the_site_says_whether_it_keeps_accounts() -> None:
    text = "Configuration data as of 2026-01-01\nAccountingStorageType   = accounting_storage/none\nx = a = b\n"
    assert parse_settings(text) == {"AccountingStorageType": "accounting_storage/none", "x": "a = b"}


@pytest.mark.parametrize("storage", ["accounting_storage/none", "accounting_storage/slurmdbd"])
def test_accounting_is_asked_only_where_it_is_kept_which_is_asked_once(storage: str) -> None:
    asked: list[str] = []

    class Client(SlurmClient):
        def settings(self) -> dict[str, str]:
            asked.append("scontrol")
            return {"AccountingStorageType": storage}

        def accounted_state(self, job_id: str) -> str:
            asked.append("sacct")
            return "TIMEOUT"

    queue = SlurmQueue(Client())
    found = [queue.accounted("7"), queue.accounted("8")]
    is_kept = storage != "accounting_storage/none"
    assert [job.state if job else None for job in found] == ["TIMED_OUT" if is_kept else None] * 2
    assert asked == (["scontrol", "sacct", "sacct"] if is_kept else ["scontrol"])


@given(st.text(), st.text(), st.text(), st.booleans(), st.booleans())
def test_no_word_of_slurm_raises(word: str, reason: str, start: str, has_run: bool, down: bool) -> None:
    assert judge_job(word, reason, start=start, has_run=has_run, nodes_are_down=down)[0]
    assert judge_job("PENDING", reason, start=start, has_run=has_run, nodes_are_down=down)[0]


@given(st.text())
def test_no_text_of_slurm_breaks_a_parser(text: str) -> None:
    jobs_of_squeue(text)
    parse_nodes(text)
    parse_steps(text)
    parse_key_values(text)
    parse_gpus(text)
    expand_host_list(text)
