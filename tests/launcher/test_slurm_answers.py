"""SLURM's text as it really is: parsed without surprise, and every word of it has a meaning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.launcher.slurm import (
    SlurmError,
    clean_environment,
    parse_gpus,
    parse_job_id,
    parse_key_values,
    parse_nodes,
    parse_queue,
    parse_steps,
)
from corral.launcher.slurm_checks import expand_host_list
from corral.launcher.slurm_states import judge_job

QUEUE = (
    '12|RUNNING|None|2026-01-01T10:00:00|2026-01-01T11:00:00|5:01|2|n[1-2]|2026-01-01T09:59:00|exp.t|{"corral":1,"trial_uuid":"u","attempt":0}\n'
    "13|PENDING|Resources|N/A|N/A|0:00|4||2026-01-01T10:00:00|other|(null)\n"
    "14|CANCELLED|None|N/A|N/A|0:03|1|n1|2026-01-01T10:00:00|pipe|a|b|c\n"
    "broken line\n"
)


def test_squeue_lines_become_jobs_and_comments_identify_ours() -> None:
    jobs = parse_queue(QUEUE)
    assert [(job.job_id, job.state) for job in jobs] == [("12", "RUNNING"), ("13", "PENDING"), ("14", "CANCELLED")]
    assert jobs[0].tag == {"corral": 1, "trial_uuid": "u", "attempt": 0}
    assert jobs[1].tag == jobs[2].tag == {}
    assert jobs[2].comment == "a|b|c"


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
    assert values["JobName"] == "a b" and values["NodeList"] == "n[1-2]" and values["ExitCode"] == "0:0"


def test_sinfo_lines_become_nodes() -> None:
    (node, other) = parse_nodes(
        "n1|debug*|8|8000|gpu:8|(null)|idle|infinite\nn2|short|4+|64+|(null)|ib,h100|down*|1:00\n"
    )
    assert (node.name, node.partition, node.is_default_partition, node.cpus, node.gpus) == ("n1", "debug", True, 8, 8)
    assert (other.cpus, other.gpus, other.features, other.is_up) == (4, 0, ("ib", "h100"), False)


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
        }
    )
    assert cleaned == {"SLURM_CONF": "/c", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("word", "reason", "state"),
    [
        ("PENDING", "Resources", "QUEUED"),
        ("PENDING", "PartitionNodeLimit", "BLOCKED"),
        ("PENDING", "JobHeldUser", "HELD"),
        ("PENDING", "launch failed requeued held", "HELD"),
        ("CONFIGURING", "None", "STARTING"),
        ("RUNNING", "None", "RUNNING"),
        ("COMPLETING", "None", "STOPPING"),
        ("COMPLETED", "None", "FAILED"),
        ("FAILED", "NonZeroExitCode", "FAILED"),
        ("TIMEOUT", "TimeLimit", "TIMED_OUT"),
        ("DEADLINE", "DeadLine", "TIMED_OUT"),
        ("NODE_FAIL", "NodeDown", "NODE_FAILED"),
        ("PREEMPTED", "None", "PREEMPTED"),
        ("OUT_OF_MEMORY", "OutOfMemory", "OOM"),
        ("CANCELLED by 1000", "None", "CANCELLED"),
        ("SUSPENDED", "None", "SUSPENDED"),
        ("FUTURE_WORD", "None", "UNKNOWN"),
    ],
)
def test_slurms_words_have_a_meaning(word: str, reason: str, state: str) -> None:
    assert judge_job(word, reason).state == state


@given(st.text(), st.text())
def test_no_word_of_slurm_raises(word: str, reason: str) -> None:
    assert judge_job(word, reason).state


@given(st.text())
def test_no_text_of_slurm_breaks_a_parser(text: str) -> None:
    parse_queue(text)
    parse_nodes(text)
    parse_steps(text)
    parse_key_values(text)
    parse_gpus(text)
    expand_host_list(text)
