"""One word for a trial: what each piece of evidence leads to, and a live look at a real trial."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.attempts import AttemptRecord
from corral.experiments.secrets import TrialSecrets
from corral.experiments.trial_directory import StopRequest, TrialDirectory
from corral.launcher.slurm import QueuedJob
from corral.launcher.status import Evidence, WorkerLife, describe, judge
from corral.launcher.status_reader import StatusReader
from corral.launcher.status_view import format_duration, render_json, render_trial, render_trials
from corral.launcher.trial_redis import connect_name_service
from corral.launcher.trials import TrialFacts, read_facts
from tests.launcher.conftest import MakeTrial

NOW = 10_000.0
WORKERS = ("master_worker/0", "rollout_worker/0", "rollout_worker/1")
FACTS = TrialFacts(
    directory=TrialDirectory(Path("/nowhere")),
    experiment="exp",
    trial="t",
    uuid="0" * 32,
    mode="local",
    total_steps=10,
    workers=WORKERS,
    lease_ttl_s=10.0,
    setup_timeout_s=600.0,
    stop_grace_s=60.0,
)
ATTEMPT = AttemptRecord(
    attempt=0, resume=False, mode="local", start_slot=1, submitted_at=NOW - 500.0, submit_host="here"
)
STARTED = WorkerLife(pid=7, node="n1", started_at=NOW - 400.0)


def record(**fields: Any) -> dict[str, Any]:
    return {"phase": "train", "phase_since": NOW - 5.0, "beat": NOW - 1.0, "pid": 8, "node": "n1"} | fields


HEALTHY = Evidence(
    facts=FACTS,
    now=NOW,
    attempt=ATTEMPT,
    lives={worker: STARTED for worker in WORKERS},
    ended=None,
    redis_started=True,
    is_done=False,
    is_stopped=False,
    stop_requested_by=None,
    is_supervised=True,
    job=None,
    job_id="",
    slurm_error="",
    records={worker: record() for worker in WORKERS},
)


def with_record(worker: str, value: dict[str, Any] | None) -> dict[str, Any]:
    records = {name: record() for name in WORKERS if name != worker}
    return records if value is None else records | {worker: value}


def lives(worker: str, life: WorkerLife) -> dict[str, WorkerLife]:
    return {name: STARTED for name in WORKERS} | {worker: life}


RESTARTED = WorkerLife(node="n1", started_at=NOW - 3.0, restarts=2, exit="signal 9", ended_at=NOW - 1.0)
JUST_STARTED = WorkerLife(pid=7, node="n1", started_at=NOW - 3.0)
ON_SLURM = dataclasses.replace(FACTS, mode="slurm")


def job(state: str, reason: str = "None") -> QueuedJob:
    return QueuedJob(
        job_id="7",
        state=state,
        reason=reason,
        start="N/A",
        end="N/A",
        elapsed="0:00",
        num_nodes="1",
        nodes="",
        submitted="",
        name="exp.t",
        comment="",
    )


DOWN: dict[str, Any] = {"slurm_error": "squeue timed out", "unreachable_since": NOW - 30.0}


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({}, "RUNNING", ""),
        ({"attempt": None}, "UNKNOWN", "never started"),
        ({"ended": {"state": "FAILED", "cause": "oom", "time": NOW}}, "FAILED", "oom"),
        ({"is_supervised": False}, "LOST", "--resume"),
        ({"is_supervised": False, "is_done": True}, "COMPLETE", ""),
        ({"is_supervised": False, "is_stopped": True}, "STOPPED", ""),
        ({"is_done": True}, "STOPPING", "done"),
        ({"stop_requested_by": "me@here"}, "STOPPING", "me@here"),
        ({"records": None, "redis_started": False}, "STARTING", "Redis"),
        ({"records": None}, "DEGRADED", "Redis does not answer"),
        ({"records": with_record("rollout_worker/1", record(phase="setup"))}, "STARTING", "2 of 3"),
        (
            {"records": with_record("rollout_worker/1", None), "lives": lives("rollout_worker/1", JUST_STARTED)},
            "STARTING",
            "2 of 3",
        ),
        (
            {"records": with_record("rollout_worker/1", None), "lives": lives("rollout_worker/1", RESTARTED)},
            "DEGRADED",
            "rollout_worker/1 restarting on n1 after signal 9",
        ),
        ({"records": with_record("rollout_worker/0", record(beat=NOW - 52))}, "DEGRADED", "0 silent 52s on n1"),
        ({"records": with_record("master_worker/0", record(beat=NOW - 52))}, "UNRESPONSIVE", "master_worker/0 silent"),
        ({"records": with_record("master_worker/0", None)}, "UNRESPONSIVE", "no record"),
        ({"facts": ON_SLURM, "records": None, **DOWN}, "UNKNOWN", "squeue timed out"),
        ({"facts": ON_SLURM, **DOWN}, "RUNNING", "unreachable since"),
        ({"facts": ON_SLURM, "job": job("PENDING", "Priority"), "jobs_known_at": NOW, **DOWN}, "QUEUED", "unreach"),
        ({"facts": ON_SLURM, "job": None, "records": None, "jobs_known_at": NOW}, "LOST", "SLURM does not know"),
        ({"facts": ON_SLURM, "job": None, "jobs_known_at": NOW}, "RUNNING", "its workers speak"),
        ({"facts": ON_SLURM, "job": job("RUNNING")}, "RUNNING", ""),
        ({"facts": ON_SLURM, "job": job("PENDING", "Priority")}, "QUEUED", "Priority"),
        ({"facts": ON_SLURM, "job": job("TIMEOUT")}, "TIMED_OUT", "--resume"),
        ({"facts": ON_SLURM, "job": job("TIMEOUT"), "is_stopped": True}, "STOPPED", ""),
        ({"facts": ON_SLURM, "job": job("COMPLETED"), "is_done": True}, "COMPLETE", ""),
        ({"facts": ON_SLURM, "job": job("COMPLETED")}, "FAILED", "without finishing"),
    ],
)  # fmt: skip
def test_the_evidence_decides_the_word(changes: dict[str, Any], state: str, words: str) -> None:
    found, note = judge(dataclasses.replace(HEALTHY, **changes))
    assert found == state
    assert words in note


def test_tables_show_trials_and_workers_without_obeying_what_they_quote() -> None:
    status = describe(dataclasses.replace(HEALTHY, ended={"state": "FAILED", "cause": "a\x1b[2J\nb", "time": NOW}))
    table = render_trials([status])
    assert table.splitlines()[0].split() == ["TRIAL", "STATE", "STEP", "AGE", "NODES", "JOB", "ATTEMPT", "NOTE"]
    assert "FAILED" in table and "8m20s" in table and len(table.splitlines()) == 2 and "\x1b" not in table
    shown = render_trial(describe(HEALTHY))
    assert "rollout_worker/1" in shown and "train 5s" in shown
    assert json.loads(render_json([status]))[0]["workers"][0]["worker"] == "master_worker/0"
    assert "\x1b[32mRUNNING" in render_trial(describe(HEALTHY), colour=True)


def test_durations_are_short() -> None:
    assert [format_duration(value) for value in (None, 5.4, 310, 11520, 187200)] == [
        "-",
        "5s",
        "5m10s",
        "3h12m",
        "2d4h",
    ]


def test_a_running_trial_is_seen_through_its_leases_and_after_its_end(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["master"]}, model_workers=1, servers=0)
    trial.start()
    trial.wait_for_workers()
    facts = read_facts(trial.directory)
    assert facts is not None
    assert StatusReader().read([facts])[0].state == "STARTING"
    with connect_name_service(trial.directory, facts.uuid, timeout_s=5.0) as names:
        for worker in facts.workers:
            now = trial.events("worker_started", worker=worker)[0]["time"]
            value = {"phase": "train", "phase_since": now, "beat": now, "pid": 5, "node": "x", "waiting_for": "nobody"}
            names.add(f"workers/{worker}", json.dumps(value))
        (status,) = StatusReader().read([facts])
    assert (status.state, status.step, status.attempt) == ("RUNNING", 3, 0)
    assert [(row.state, row.phase, row.waiting_for) for row in status.workers] == [("UP", "train", "nobody")] * 3
    trial.directory.write_stop_request(StopRequest(requested_at=0.0, by="me", now=True, grace_s=1.0))
    assert trial.wait() == 0
    with pytest.raises(FileNotFoundError):
        TrialSecrets.load(trial.directory.secrets_path)
    (status,) = StatusReader().read([facts])
    assert status.state == "STOPPED" and status.is_final
    assert {row.state.split()[0] for row in status.workers} == {"ENDED"}
