"""One word for a trial: what each piece of evidence leads to, and a live look at a real trial."""

import dataclasses
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.attempts import AttemptEnd, AttemptRecord, EndState, Follows
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.worker_record import Trouble, WeightUpdate, WorkerRecord
from corral.launcher.follow import live_line, progress_bar, progress_line
from corral.launcher.slurm.client import SlurmClient
from corral.launcher.slurm.job_queue import QueueAnswer, SlurmQueue
from corral.launcher.slurm.verdict import Job
from corral.launcher.status.evidence import Evidence, ExtraJob, group_rows, worker_rows
from corral.launcher.status.judge import describe, judge
from corral.launcher.status.page import explain
from corral.launcher.status.reader import StatusReader
from corral.launcher.status.text import format_duration, render_json, render_trial, render_trials, render_workers
from corral.launcher.trial.ends import End
from corral.launcher.trial.metrics import pace_of
from corral.launcher.trial.redis_server import connect_name_service
from corral.launcher.trial.view import Finding, PastAttempt, TrialFacts, TrialView, WorkerLife, read_facts
from corral.workers.lifecycle.presence import Presence
from tests.launcher.conftest import MakeTrial
from tests.launcher.jobs import job_of
from tests.launcher.trials import wait_until

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
    setup_timeout_s=600.0,
    healthy_after_s=600.0,
    stop_grace_s=60.0,
)
ATTEMPT = AttemptRecord(attempt=0, resume=False, mode="local", start_slot=1, submitted_at=NOW - 500.0)
STARTED = WorkerLife(pid=7, node="n1", started_at=NOW - 400.0)


def ended(state: str, cause: str = "", *, then: Follows = "") -> AttemptEnd:
    return AttemptEnd(attempt=0, state=EndState(state), cause=cause, then=then, ended_at=NOW)


def record(**fields: Any) -> WorkerRecord:
    plain = WorkerRecord(phase="train", in_phase_s=4.0, beat=NOW - 1.0, pid=8, node="n1")
    return msgspec.structs.replace(plain, **fields)


HEALTHY = Evidence(
    facts=FACTS,
    now=NOW,
    attempt=ATTEMPT,
    lives={worker: STARTED for worker in WORKERS},
    ended=None,
    redis_started=True,
    is_done=False,
    is_stopped=False,
    stop_request=None,
    is_supervised=True,
    job=None,
    job_id="",
    records={worker: record() for worker in WORKERS},
)


def with_record(worker: str, value: WorkerRecord | None) -> dict[str, WorkerRecord]:
    records = {name: record() for name in WORKERS if name != worker}
    return records if value is None else records | {worker: value}


def lives(worker: str, life: WorkerLife) -> dict[str, WorkerLife]:
    return {name: STARTED for name in WORKERS} | {worker: life}


RESTARTED = WorkerLife(node="n1", started_at=NOW - 3.0, restarts=2, exit="signal 9", ended_at=NOW - 1.0)
JUST_STARTED = WorkerLife(pid=7, node="n1", started_at=NOW - 3.0)
ASKED = StopRequest(requested_at=0.0, by="me@here", now=False, grace_s=60.0)
TOLD = msgspec.structs.replace(ASKED, by="SLURM (cancelled)", state="CANCELLED")
ON_SLURM = dataclasses.replace(FACTS, mode="slurm")


def job(state: str, reason: str = "None", *, has_run: bool = False, exit_code: str = "") -> Job:
    """What squeue shows, and what a closer look finds."""

    class Slurm(SlurmClient):
        def job(self, job_id: str) -> dict[str, str] | None:
            return {"ExitCode": exit_code}

    return SlurmQueue(Slurm()).look_closer(job_of("7", state, reason=reason), has_run=has_run)


NO_REDIS = TrialView(
    [{"event": "task_ended", "attempt": 0, "who": "redis", "why": "exit 127 (no redis-server)", "caused_by": ""}]
)
DOWN = QueueAnswer(error="squeue timed out", unreachable_since=NOW - 30.0)
AWAY = msgspec.structs.replace(DOWN, asked_at=NOW - 60.0)
ANSWERED = QueueAnswer(asked_at=NOW)


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({}, "RUNNING", ""),
        ({"redis_started": False, "records": None}, "STARTING", "Redis is starting"),
        ({"redis_started": False, "records": None, "view": NO_REDIS}, "DEGRADED", "redis exit 127 (no redis-server)"),
        ({"attempt": None}, "UNKNOWN", "rl-submit --resume"),
        ({"ended": ended("FAILED", "oom")}, "FAILED", "oom"),
        ({"is_supervised": False}, "LOST", "--resume"),
        ({"is_supervised": False, "is_done": True}, "COMPLETE", ""),
        ({"is_supervised": False, "is_stopped": True}, "STOPPED", ""),
        ({"is_done": True}, "STOPPING", "done"),
        ({"stop_request": ASKED}, "STOPPING", "me@here"),
        ({"records": None, "redis_started": False}, "STARTING", "Redis"),
        ({"records": None}, "DEGRADED", "Redis does not answer"),
        ({"records": with_record("rollout_worker/1", record(phase="setup", is_setting_up=True))}, "STARTING", "2 of 3"),
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
        ({"now": NOW + 8.0, "redis_now": NOW}, "RUNNING", ""),  # our clock is ahead of the trial's
        ({"now": NOW, "redis_now": NOW + 52}, "UNRESPONSIVE", "master_worker/0 silent 53s"),
        ({"facts": ON_SLURM, "records": None, "queue": DOWN}, "UNKNOWN", "squeue timed out"),
        ({"facts": ON_SLURM, "queue": DOWN}, "RUNNING", "unreachable since"),
        ({"facts": ON_SLURM, "job": job("PENDING", "Priority"), "queue": AWAY}, "QUEUED", "unreach"),
        ({"facts": ON_SLURM, "job": None, "records": None, "queue": ANSWERED}, "LOST", "the cluster does not know"),
        ({"facts": ON_SLURM, "job": None, "queue": ANSWERED}, "RUNNING", "its workers speak"),
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


def test_a_worker_that_has_ended_is_not_ready_though_its_lease_lasts() -> None:
    left = dataclasses.replace(STARTED, exit="signal 9", ended_at=NOW - 1.0)
    gone = {name: left for name in WORKERS if name.startswith("rollout_worker/")}
    status = describe(dataclasses.replace(HEALTHY, lives=HEALTHY.lives | gone))
    (row,) = [row for row in status.groups if row.group == "rollout_worker"]
    assert (row.ready, row.total) == (0, 2)
    assert status.state == "DEGRADED" and "restarting on n1 after signal 9" in status.note


def test_a_worker_that_restarts_shows_how_it_ended_and_what_to_type() -> None:
    how = "exit 80 (the plan gives rollout_worker/1 1 GPU, and it sees 0)"
    events = [
        {"time": NOW - 9, "event": "worker_started", "attempt": 0, "worker": "rollout_worker/1", "node": "n1"},
        {"time": NOW - 5, "event": "task_ended", "attempt": 0, "who": "rollout_worker/1", "code": 80, "why": how},
        {"time": NOW - 3, "event": "worker_started", "attempt": 0, "worker": "rollout_worker/1", "node": "n1"},
    ]
    life = TrialView(events, 0).lives(["rollout_worker/1"])
    status = describe(
        dataclasses.replace(HEALTHY, lives=HEALTHY.lives | life, records=with_record("rollout_worker/1", None))
    )
    assert status.state == "DEGRADED" and status.note == f"rollout_worker/1 restarting on n1 after {how}"
    assert f"\nnext       rl-logs {status.experiment}/{status.trial} --errors\n" in render_trial(status)


def test_tables_show_trials_and_workers_without_obeying_what_they_quote() -> None:
    status = describe(dataclasses.replace(HEALTHY, ended=ended("FAILED", "a\x1b[2J\nb")))
    table = render_trials([status])
    assert table.splitlines()[0].split() == ["TRIAL", "STATE", "STEP", "AGE", "NODES", "JOB", "ATTEMPT", "NOTE"]
    assert "FAILED" in table and "8m20s" in table and len(table.splitlines()) == 2 and "\x1b" not in table
    shown = render_trial(describe(HEALTHY), wide=True)
    assert "rollout_worker/1" in shown and "train 5s" in shown
    by_group = render_trial(describe(HEALTHY)).splitlines()
    assert by_group[1].split() == ["GROUP", "READY", "RESTARTS", "NODES", "LAST", "SEEN", "NOTE"]
    assert by_group[3].split() == ["rollout_worker", "2/2", "0", "n1", "1s"]
    assert json.loads(render_json([status]))[0]["workers"][0]["worker"] == "master_worker/0"
    assert "\x1b[32mRUNNING" in render_trial(describe(HEALTHY), colour=True)


def test_a_headline_breaks_between_its_parts_where_the_terminal_ends() -> None:
    lines = render_trial(describe(HEALTHY), colour=True, width=40).splitlines()
    whole = render_trial(describe(HEALTHY)).splitlines()[0]
    headline = lines[: next(index for index, line in enumerate(lines) if line.startswith("GROUP"))]
    assert len(headline) > 1 and all(line.startswith("  ") for line in headline[1:])
    assert all(len(line.replace("\x1b[32m", "").replace("\x1b[0m", "")) <= 40 for line in headline)
    joined = "  ".join(line.strip() for line in headline)
    assert joined.replace("\x1b[32m", "").replace("\x1b[0m", "") == whole


def test_a_trial_that_ended_says_what_to_type_next() -> None:
    running = describe(HEALTHY)
    assert "\nnext " not in render_trial(running)
    for state, words in (("FAILED", f"rl-logs {running.experiment}/{running.trial} --errors"), ("LOST", "--resume")):
        shown = render_trial(dataclasses.replace(running, state=state))
        assert words in next(line for line in shown.splitlines() if line.startswith("next "))


def test_a_long_note_goes_on_below_itself() -> None:
    status = dataclasses.replace(describe(HEALTHY), note="model_worker/0 exit 1; model_worker used up its 1 restarts")
    whole = render_trials([status]).splitlines()
    column = whole[0].index("NOTE")
    header, first, *more = render_trials([status], width=column + 24).splitlines()
    assert len(whole) == 2 and header == whole[0] and more
    assert all(len(line) <= column + 24 and not line[:column].strip() for line in more)
    assert " ".join([first[column:], *(line.strip() for line in more)]) == status.note
    below = render_trials([status], width=column + 5).splitlines()  # no room for words beside the others
    assert max(len(line) for line in below) <= column + 5
    assert " ".join(line.strip() for line in below[3:]) == status.note


def test_the_note_of_a_trial_is_broken_where_the_terminal_ends() -> None:
    status = dataclasses.replace(describe(HEALTHY), cause="model /m cannot be read any more; put it back " * 6)
    lines = render_trial(status, width=80).splitlines()
    assert max(map(len, lines[:6])) <= 80 and lines[2].startswith("  ")
    assert lines[1].startswith("  model /m cannot be read any more")


def test_a_bar_takes_the_room_that_the_words_leave() -> None:
    status = dataclasses.replace(describe(HEALTHY), step=5, total_steps=10)
    assert progress_bar(status, room=100) == f"[{'=' * 12}{' ' * 12}] "
    assert progress_bar(status, room=13) == "[=====     ] "
    assert progress_bar(status, room=10) == ""
    assert progress_bar(dataclasses.replace(status, total_steps=None), room=100) == ""


def test_a_table_that_is_too_wide_keeps_its_columns_and_has_its_last_one_below() -> None:
    waiting = record(phase="wait for a batch", waiting_for="3 more of 8 trajectories", waits_for=WORKERS[1:])
    status = describe(dataclasses.replace(HEALTHY, records=with_record("master_worker/0", waiting)))
    lines = render_workers(status.workers, width=90).splitlines()
    assert max(len(line) for line in lines) <= 90
    assert lines[1] == "    WAITING FOR" and lines[3] == "    3 more of 8 trajectories (rollout_worker x2)"
    assert lines[4].startswith("rollout_worker/0") and lines[5].startswith("rollout_worker/1")
    assert len(render_workers(status.workers, width=200).splitlines()) == 4


def test_the_bar_stays_in_a_narrow_terminal_and_words_go() -> None:
    healthy = describe(HEALTHY)
    trainers = [dataclasses.replace(row, version="3.18") for row in healthy.workers]
    rows = [*trainers, dataclasses.replace(trainers[0], worker="generation_server/0", version="3.17")]
    status = dataclasses.replace(
        healthy, step=120, total_steps=400, workers=rows, numbers="accuracy 0.812  reward 0.743", age_s=3 * 3600.0
    )
    wide, narrow = live_line(status, width=200), live_line(status, width=80)
    assert wide.startswith("[=") and "answers by step 17" in wide and "age 3h00m" in wide
    assert "answers by" not in live_line(dataclasses.replace(status, workers=trainers), width=200)
    assert narrow.startswith("[=") and len(narrow) <= 80 and "reward 0.743" in narrow
    assert "step 120/400" in narrow and "RUNNING" in narrow and "answers by" not in narrow


def test_a_running_trial_says_its_speed_with_units_and_when_it_will_be_done() -> None:
    steps = [{"step": step, "time": 100.0 + 1.5 * step, "train/tokens": 3000.0} for step in range(1, 31)]
    late = [{"step": 31, "time": 500.0, "train/tokens": 3000.0}]  # after a restart
    evaluated = [{"step": 31, "time": 501.0, "eval/accuracy": 0.5}]
    pace = pace_of([*steps, *late, *evaluated])
    status = dataclasses.replace(describe(HEALTHY), step=31, total_steps=71, pace=pace)
    assert status.speed == "1.5 s/step  2,000 tokens/s  about 1m00s to go"
    assert status.speed in progress_line(status) and status.speed in render_trial(status)
    assert dataclasses.replace(status, state="COMPLETE").speed == ""
    assert pace_of(steps[:1]) is None and pace_of([]) is None


def test_workers_of_a_trial_that_ends_are_not_being_restarted() -> None:
    left = WorkerLife(node="n1", started_at=NOW - 30.0, restarts=1, exit="exit 0", ended_at=NOW - 1.0)
    ending = dataclasses.replace(
        HEALTHY, is_done=True, records=with_record("rollout_worker/1", None), lives=lives("rollout_worker/1", left)
    )
    shown = render_trial(describe(ending))
    assert "STOPPING" in shown and "restarting" not in shown
    over = dataclasses.replace(ending, ended=ended("COMPLETE"), records=None, is_supervised=False)
    (row, *_) = [line for line in render_trial(describe(over)).splitlines() if line.startswith("rollout_worker")]
    assert row.split()[1] == "-"


def test_durations_are_short() -> None:
    assert [format_duration(value) for value in (None, 5.4, 310, 11520, 187200)] == [
        "-",
        "5s",
        "5m10s",
        "3h12m",
        "2d4h",
    ]


def test_a_running_trial_is_seen_through_its_leases_and_after_its_end(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_trial({"master_worker/0": ["master 3"]}, model_workers=1, servers=0)
    trial.start()
    trial.wait_for_workers()
    facts = read_facts(trial.directory)
    assert facts is not None
    assert StatusReader().read([facts])[0].state == "STARTING"
    with ExitStack() as stack:
        names = stack.enter_context(connect_name_service(trial.directory, facts.uuid, timeout_s=5.0))
        for worker in facts.workers:
            presence = Presence(names, f"workers/{worker}", owner=worker, ttl_s=10, identity=WorkerRecord(pid=5))
            stack.enter_context(presence).enter("train", waiting_for="nobody")
        wait_until(lambda: StatusReader().read([facts])[0].state == "RUNNING", "all workers have registered")
        (status,) = StatusReader().read([facts])
        # This machine's clock is ahead of the trial's by more than a worker may be silent.
        monkeypatch.setattr("corral.launcher.status.reader.time", SimpleNamespace(time=lambda: time.time() + 60.0))
        assert StatusReader().read([facts])[0].state == "RUNNING"
        monkeypatch.undo()
    assert (status.state, status.step, status.attempt) == ("RUNNING", 3, 0)
    assert [(row.state, row.phase, row.waiting_for) for row in status.workers] == [("UP", "train", "nobody")] * 3
    trial.directory.write_stop_request(StopRequest(requested_at=0.0, by="me", now=True, grace_s=1.0))
    assert trial.wait() == 0
    with pytest.raises(FileNotFoundError):
        TrialSecrets.load(trial.directory.secrets_path)
    (status,) = StatusReader().read([facts])
    assert status.state == "STOPPED" and status.is_final
    assert {row.state.split()[0] for row in status.workers} == {"ENDED"}


def extra_job(state: str, reason: str = "None", *, is_elastic: bool = True) -> ExtraJob:
    worker = "rollout_worker/1"
    return ExtraJob(allocation=worker, is_elastic=is_elastic, job=job(state, reason), workers=(worker,))


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        # A frozen worker has no lease any more, but its last record and no exit.
        ({"records": with_record("rollout_worker/1", None), "last_seen": {"rollout_worker/1": record(beat=NOW - 14)}},
         "DEGRADED", "rollout_worker/1 silent 14s on n1"),
        ({"records": with_record("master_worker/0", None), "last_seen": {"master_worker/0": record(beat=NOW - 14)}},
         "UNRESPONSIVE", "master_worker/0 silent 14s"),
        ({"records": with_record("rollout_worker/1", record(beat=NOW - 7))}, "DEGRADED", "silent 7s"),
        ({"records": with_record("rollout_worker/1", record(beat=NOW - 7, phase="setup", is_setting_up=True))},
         "STARTING", "2 of 3"),
        # A server is started anew inside of its worker.
        ({"records": with_record("rollout_worker/1", record(restarts=2, waiting_for="no room", is_setting_up=True))},
         "DEGRADED", "rollout_worker/1 restarting on n1 (restart 2): no room"),
        # What the process before it said does not count.
        ({"records": with_record("rollout_worker/1", None),
          "last_seen": {"rollout_worker/1": record(beat=NOW - 14, incarnation="old")},
          "lives": lives("rollout_worker/1", dataclasses.replace(JUST_STARTED, incarnation="new", restarts=1))},
         "DEGRADED", "rollout_worker/1 restarting"),
        ({"records": with_record("master_worker/0", record(attempt=7))}, "UNRESPONSIVE", "no record"),
        # An elastic worker holds nobody up; a group's job does.
        ({"records": with_record("rollout_worker/1", None), "extra_jobs": (extra_job("PENDING", "Resources"),)},
         "RUNNING", ""),
        ({"records": with_record("rollout_worker/1", None),
          "extra_jobs": (extra_job("PENDING", "Resources", is_elastic=False),)}, "STARTING", "job 7 QUEUED: Resources"),
        ({"records": with_record("rollout_worker/1", None),
          "lives": lives("rollout_worker/1", dataclasses.replace(JUST_STARTED, exit="signal 9", ended_at=NOW - 3)),
          "extra_jobs": (extra_job("PENDING", "Resources", is_elastic=False),)}, "DEGRADED", "job 7 QUEUED: Resources"),
        ({"records": with_record("rollout_worker/1", None), "groups_kept_down": frozenset({"rollout_worker"})},
         "RUNNING", ""),
        ({"given_up": {"rollout_worker/1": "out of restarts"}}, "DEGRADED", "goes on without rollout_worker/1"),
        # Between two attempts.
        ({"facts": ON_SLURM, "job": job("PENDING", "Dependency", has_run=True), "has_run": True,
          "attempt_ended": ended("REQUEUED", "time limit", then="requeue")},
         "REQUEUED", "attempt 1 waits in job 7"),
        ({"facts": ON_SLURM, "job": job("PENDING", "BeginTime", has_run=True), "has_run": True},
         "REQUEUED", "without a word"),
        ({"facts": ON_SLURM, "job": job("RUNNING"), "attempt_ended": ended("PREEMPTED", then="requeue")},
         "STARTING", "attempt 1 starts in job 7"),
        ({"facts": ON_SLURM, "job": None, "records": None, "queue": ANSWERED,
          "attempt_ended": ended("NODE_FAILED", "n2", then="requeue")},
         "NODE_FAILED", "ended NODE_FAILED (n2)"),
        ({"facts": ON_SLURM, "job": None, "records": None, "queue": ANSWERED,
          "attempt_ended": ended("REQUEUED", then="requeue")}, "LOST", "no job is there to go on"),
        # What only SLURM knows.
        ({"facts": ON_SLURM, "job": job("FAILED", "JobLaunchFailure", exit_code="0:53")}, "FAILED", "folder"),
        ({"facts": ON_SLURM, "job": job("FAILED", "NonZeroExitCode"),
          "failure": End(time=NOW, attempt=0, who="rollout_worker/1", code=3, why="exit 3", node="n4")},
         "FAILED", "rollout_worker/1 exit 3 on n4"),
        ({"facts": ON_SLURM, "job": job("FAILED", "NonZeroExitCode"),
          "failure": End(time=NOW, attempt=0, who="rollout_worker/1", code=WorkerExit.OUT_OF_MEMORY, why="too little")},
         "OOM", "rollout_worker/1 too little"),
        ({"facts": ON_SLURM, "job": dataclasses.replace(job("NODE_FAIL", "NodeDown"), nodes="n[3-4]")},
         "NODE_FAILED", "n[3-4]: a node failed"),
        ({"facts": ON_SLURM, "job": None, "records": None, "queue": ANSWERED, "accounted": job("TIMEOUT")},
         "TIMED_OUT", "time limit"),
        ({"facts": ON_SLURM, "job": job("CANCELLED"), "is_stopped": True, "stop_request": ASKED},
         "STOPPED", ""),
        ({"facts": ON_SLURM, "job": job("CANCELLED"), "is_stopped": True, "stop_request": TOLD},
         "CANCELLED", ""),
    ],
)  # fmt: skip
def test_what_outlives_leases_jobs_and_attempts_decides(changes: dict[str, Any], state: str, words: str) -> None:
    found, note = judge(dataclasses.replace(HEALTHY, **changes))
    assert found == state, note
    assert words in note


def test_zombies_are_a_note_and_never_counted() -> None:
    evidence = dataclasses.replace(
        HEALTHY,
        records=with_record("rollout_worker/1", record(attempt=7)),
        last_seen={"rollout_worker/1": record(attempt=7)},
        zombies=("rollout_worker/1 of attempt 7 still speaks, from n1",),
    )
    status = describe(evidence)
    assert "of attempt 7 still speaks" in status.note
    (group,) = [group for group in status.groups if group.group == "rollout_worker"]
    assert (group.ready, group.total) == (1, 2)


def test_groups_say_what_their_jobs_wait_for_and_what_holds_them() -> None:
    waiting = dataclasses.replace(
        HEALTHY,
        records=with_record("rollout_worker/1", None),
        extra_jobs=(extra_job("PENDING", "Resources"),),
    )
    (group,) = [group for group in describe(waiting).groups if group.group == "rollout_worker"]
    assert (group.ready, group.note) == (1, "1: job 7 QUEUED: Resources: waits for resources")
    kept_down = dataclasses.replace(HEALTHY, records={}, groups_kept_down=frozenset({"rollout_worker"}))
    (group,) = [group for group in describe(kept_down).groups if group.group == "rollout_worker"]
    assert "--group rollout_worker --undo" in group.note


def test_what_train_steps_found_out_is_shown_and_an_alarm_with_its_causes() -> None:
    fine = Finding(is_alarm=False, text="both sides agree", details="of 9 tokens", causes=(), step=1)
    status = describe(dataclasses.replace(HEALTHY, findings=(fine,)))
    assert status.note == "" and "\nfound      both sides agree\n" in render_trial(status)
    alarm = Finding(
        topic="gap", is_alarm=True, text="both sides differ", details="by 2 nats", causes=("weights", "rest"), step=4
    )
    status = describe(dataclasses.replace(HEALTHY, findings=(alarm,)))
    assert status.state == "RUNNING" and "ALARM: both sides differ" in render_trials([status])
    assert "  RUNNING  step -  ALARM: gap  " in render_trial(status).splitlines()[0]
    assert render_trial(status).count("both sides differ") == 1
    lines = "\nALARM      both sides differ, since step 4: by 2 nats\n           - weights\n           - rest\n"
    assert lines in render_trial(status)


def test_a_tracker_that_failed_is_trouble_until_it_has_run_for_long() -> None:
    facts = dataclasses.replace(FACTS, trackers=("wandb",))

    def troubles(**fields: Any) -> Sequence[str]:
        life = WorkerLife(failure="exit 1 (ValueError: no key)", restarts=3)
        failed = dataclasses.replace(life, **fields)
        return describe(dataclasses.replace(HEALTHY, facts=facts, lives=lives("tracker/0", failed))).troubles

    told = ["tracker wandb failed, restart 3: exit 1 (ValueError: no key); see rl-logs exp/t tracker/0"]
    assert troubles(started_at=NOW - 50.0, exit="exit 1") == told
    assert troubles(started_at=NOW - 50.0) == told
    assert troubles(started_at=NOW - facts.healthy_after_s) == []
    assert troubles(started_at=NOW - 50.0, failure="", exit="exit 0") == []


def test_a_server_that_refuses_its_weights_is_trouble_with_the_reason_that_the_manager_knows() -> None:
    why = "not brought to version 1.7: https://10.0.0.1:9/bring_to answered 409: no room in /dev/shm"
    told = Trouble(worker="generation_server/0", text=why, for_s=130.0)
    records = {worker: record() for worker in WORKERS} | {"gserver_manager/0": record(troubles=(told,))}
    status = describe(dataclasses.replace(HEALTHY, records=records))
    assert status.troubles == [f"generation_server/0, for 2m10s: {why}; see rl-logs exp/t gserver_manager/0"]


def test_what_is_wrong_besides_has_lines_of_its_own_and_is_in_the_note_of_a_list() -> None:
    full = "the disk of /trials is full; make room"
    status = describe(dataclasses.replace(HEALTHY, damage=("", full)))
    assert status.troubles == [full] and f"\ntrouble    {full}\n" in render_trial(status)
    assert full in render_trials([status]) and status.cause == ""


def test_what_was_compared_of_the_last_step_is_shown_beside_what_it_may_be() -> None:
    def shown(**metrics: float) -> str:
        return render_trial(dataclasses.replace(describe(HEALTHY), metrics=metrics))

    line = "\ncompared   logprob check: 61% of the last step's tokens"
    newest = {"gap/coverage": 0.61, "gap/of_allowed": 0.2231, "drift/prompts": 4.0}
    assert f"{line}, 0.22 of the evidence for an alarm\n" in shown(**newest)
    for prompts, few in ((4, "prompts"), (8, "tokens")):
        said = shown(**{**newest, "gap/coverage": 0.0, "drift/prompts": float(prompts)})
        needed = f"({prompts} prompts; at least 8, and 100 tokens, are needed)"
        assert f"\ncompared   logprob check: too few {few} for a verdict {needed}\n" in said
    none = shown(**{"gap/coverage": 0.0})
    assert "compared   logprob check: 0% of the last step's tokens\n" in none
    assert "compared" not in shown(step=3)


def test_the_newest_finding_of_a_topic_holds_in_its_attempt() -> None:
    def event(topic: str, step: int, *, attempt: int | None = None, **fields: Any) -> dict[str, Any]:
        of = {} if attempt is None else {"attempt": attempt}
        return {"event": "train_notice", "topic": topic, "text": f"{topic} {step}", "step": step, **of, **fields}

    events = [event("gap", 1), event("other", 2, is_alarm=True), event("gap", 3, is_alarm=True), event("gap", 5)]
    assert [(found.text, found.is_alarm) for found in TrialView(events, 0).findings()] == [
        ("gap 5", False),
        ("other 2", True),
    ]
    assert TrialView([event("gap", 1, attempt=0)], 1).findings() == ()


def test_the_group_of_the_servers_says_what_their_newest_weights_have_cost() -> None:
    def updated(version: str, **cost: Any) -> WorkerRecord:
        return record(weight_update=WeightUpdate(version=version, prepared_s=0.0, **cost))

    workers = ("master_worker/0", *(f"generation_server/{index}" for index in range(3)))
    records = {
        workers[0]: record(),
        workers[1]: updated("1.9", bytes_read=8_000_000, staged_s=9.0, stopped_s=9.0),
        workers[2]: updated("1.10", bytes_read=2_500_000, staged_s=0.25, stopped_s=0.009),
        workers[3]: updated("1.10", bytes_read=0, bytes_received=4_100_000, staged_s=0.3, stopped_s=0.005),
    }
    evidence = dataclasses.replace(
        HEALTHY,
        facts=dataclasses.replace(FACTS, workers=workers),
        lives=dict.fromkeys(workers, STARTED),
        records=records,
    )
    notes = {row.group: row.note for row in group_rows(evidence, worker_rows(evidence))}
    assert notes == {
        "master_worker": "",
        "generation_server": "weights 1.10: 2.5 MB read, 4.1 MB from other hosts, staged in 0.30 s, stood still 9.0 ms",
    }


def test_attempts_before_this_one_are_told_with_their_nodes() -> None:
    end = PastAttempt(
        attempt=0, state="NODE_FAILED", cause="requeued", nodes=("n15",), started_at=0.0, ended_at=18120.0
    )
    attempt = msgspec.structs.replace(ATTEMPT, attempt=1)
    shown = render_trial(describe(dataclasses.replace(HEALTHY, attempt=attempt, history=(end,))))
    assert "attempt 0  ended NODE_FAILED n15 after 5h02m at 1970-01-01" in shown and "(requeued)" in shown


def test_the_facts_behind_a_word_are_shown_with_the_command() -> None:
    answer = QueueAnswer(asked_at=NOW, question=SlurmQueue().question)
    shown = dataclasses.replace(job("RUNNING"), line="7|RUNNING")
    evidence = dataclasses.replace(HEALTHY, facts=ON_SLURM, job=shown, queue=answer)
    text = explain(evidence, describe(evidence))
    assert text.startswith("why RUNNING") and "$ squeue -h -t all" in text and "7|RUNNING" in text
    assert "3 of 3 workers hold a lease" in text
