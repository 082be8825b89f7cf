"""The page of all trials: what is damaged, hangs, or has ended costs its own row and no other."""

import json
import os
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.trial.attempts import AttemptEnd, EndState, record_attempt, write_end
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.files import lookout
from corral.launcher.slurm.job_queue import QueueAnswer, SlurmQueue
from corral.launcher.slurm.own_jobs import JobNote, OwnJobs
from corral.launcher.slurm.verdict import Job
from corral.launcher.status import page as page_module
from corral.launcher.status import reader
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.page import StatusPage
from corral.launcher.status.reader import StatusReader
from corral.launcher.trial.lock import lock_supervisor
from corral.launcher.trial.view import PlanDamagedError, TrialFacts, find_trial, read_facts
from tests.launcher.jobs import job_of
from tests.launcher.supervisor.broken_files import hanging
from tests.launcher.trials import make_plan


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(SlurmQueue, "is_here", lambda queue: False)


@pytest.fixture
def fileroot(tmp_path: Path) -> Path:
    return tmp_path / "trials"


def make_trial(fileroot: Path, name: str, *, mode: str = "local", state: str | None = "COMPLETE") -> TrialDirectory:
    """One whose end is recorded, or nowhere if it has no state."""
    directory = TrialDirectory(fileroot / "exp" / name)
    directory.create()
    plan = json.loads(make_plan(directory.path, trial=name).to_json())
    directory.plan_path.write_text(json.dumps(plan | {"mode": mode}))
    record_attempt(directory, attempt=0, resume=False, mode=mode)
    journal = Journal(directory.journal_path)
    journal.append("submitted", attempt=0, job_id="21")
    if state is not None:
        write_end(directory, AttemptEnd(attempt=0, state=EndState(state), cause="", then=""))
    return directory


def page(fileroot: Path, **options: Any) -> StatusPage:
    return StatusPage(fileroot, **({"output": "table", "show_all": False, "explain": False, "colour": False} | options))


def rows(text: str) -> dict[str, str]:
    return {line.split()[0].rpartition("/")[2]: line for line in text.splitlines()[1:]}


@pytest.fixture
def hung(fileroot: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A trial whose plan nobody gets to read."""
    monkeypatch.setattr(lookout, "_PATIENCE_S", 0.2)
    directory = make_trial(fileroot, "hung")
    with hanging(directory.plan_path):
        yield directory.path


def test_a_directory_that_hangs_costs_its_own_row_and_no_other(fileroot: Path, hung: Path) -> None:
    for number in range(3):
        make_trial(fileroot, f"done-{number}")
    shown = page(fileroot)
    threads = []
    for _ in range(3):  # drawn again and again, as with -w
        found = rows(shown.all_trials())
        assert all("COMPLETE" in found[f"done-{number}"] for number in range(3))
        assert "UNKNOWN" in found["hung"] and "is its file system there?" in found["hung"]
        threads.append(sum(thread.name == "lookout" for thread in threading.enumerate()))
    assert threads == threads[:1] * 3  # the one that hangs is not joined by another


def test_a_damaged_plan_is_named_with_a_way_out(fileroot: Path) -> None:
    make_trial(fileroot, "whole")
    damaged = make_trial(fileroot, "cut")
    damaged.plan_path.write_bytes(damaged.plan_path.read_bytes()[:100])
    found = rows(page(fileroot).all_trials())
    assert "COMPLETE" in found["whole"] and "UNKNOWN" in found["cut"] and "plan.json is damaged" in found["cut"]
    for name in ("cut", "exp/cut", str(damaged.path)):
        with pytest.raises(PlanDamagedError, match="put the file back from a backup"):
            find_trial(name, fileroot)


def test_what_ended_long_ago_is_counted_and_not_read(fileroot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        directory = make_trial(fileroot, f"done-{number}")
        write_end(directory, AttemptEnd(attempt=0, state=EndState.COMPLETE, cause="", then=""))
        if number:
            os.utime(directory.journal_path, (0.0, 0.0))
    assert set(rows(page(fileroot, show_all=True).all_trials())) == {"done-0", "done-1", "done-2"}
    found = page(fileroot).all_trials()
    assert "done-0" in found and "2 trials that ended more than a day ago are not shown; rl-status -a" in found
    monkeypatch.setattr("corral.launcher.status.page.load_facts", None)  # nobody reads them again
    (directory.path.parent / "done-0" / "plan.json").unlink()
    assert page(fileroot).all_trials() == found.splitlines()[-1]


class Jobs:
    """A queue that holds these."""

    def __init__(self, jobs: tuple[Job, ...]) -> None:
        self.jobs = jobs

    def look(self, *, newer_than: float = 0.0) -> QueueAnswer:
        return QueueAnswer(jobs=self.jobs, asked_at=newer_than + 1.0)


def pending_job(facts: TrialFacts, job_id: str) -> Job:
    return queued_job(job_id, "exp.t", trial_uuid=facts.uuid, directory=str(facts.directory.path))


def queued_job(job_id: str, name: str, **tag: str) -> Job:
    """Pending; without a tag somebody else's."""
    if tag:
        return job_of(job_id, reason="BeginTime", name=name, tag={"corral": 1, "allocation": "head"} | tag)
    return job_of(job_id, reason="BeginTime", name=name, comment="billed to project 7")


def status_of(directory: TrialDirectory) -> TrialStatus:
    """With job 22 of the trial in the queue."""
    facts = read_facts(directory)
    assert facts is not None
    (status,) = StatusReader(queue=Jobs((pending_job(facts, "22"),))).read([facts])
    return status


def test_the_next_attempt_of_a_trial_is_no_zombie(fileroot: Path) -> None:
    directory = make_trial(fileroot, "requeued", mode="slurm", state="FAILED")
    status = status_of(directory)  # the log lets job 22 go on, whatever the journal was told
    assert status.state in ("REQUEUED", "QUEUED") and not status.is_final
    assert "scancel" not in status.note and "attempt 1 waits in job 22" in status.note


def test_a_job_that_would_find_its_trial_over_is_to_be_cancelled(fileroot: Path) -> None:
    directory = make_trial(fileroot, "stopped", mode="slurm", state="FAILED")
    TrialLog(directory.log_path).request_stop("supervisor", reason="nothing follows")
    status = status_of(directory)
    assert status.state == "FAILED" and "job 22 is still PENDING; scancel 22" in status.note


def test_an_end_in_control_counts_though_the_journal_was_not_told(fileroot: Path) -> None:
    directory = make_trial(fileroot, "full-disk")
    directory.journal_path.write_bytes(b"")
    write_end(directory, AttemptEnd(attempt=0, state=EndState.STOPPED, cause="asked", then=""))
    facts = read_facts(directory)
    assert facts is not None
    (status,) = StatusReader().read([facts])
    assert (status.state, status.note) == ("STOPPED", "asked")


def test_a_trial_whose_folder_was_moved_while_it_ran_says_where_it_belongs(fileroot: Path) -> None:
    directory = make_trial(fileroot, "here", state=None)
    lock = lock_supervisor(directory, patience_s=0.5)
    directory.path.rename(fileroot / "exp" / "there")
    facts = read_facts(TrialDirectory(fileroot / "exp" / "there"))
    assert facts is not None
    (status,) = StatusReader().read([facts])
    os.close(lock)
    assert f"its folder was moved from {directory.path}, where its workers look for it; move it back" in status.note


def test_a_damaged_trial_log_is_said(fileroot: Path) -> None:
    directory = make_trial(fileroot, "damaged", state=None)
    directory.journal_path.write_bytes(b"")
    TrialLog(directory.log_path).claim("x")
    for path in directory.log_path.iterdir():
        path.write_bytes(b"nonsense")
    facts = read_facts(directory)
    assert facts is not None
    (status,) = StatusReader().read([facts])
    assert str(directory.log_path) in status.note


def test_the_work_for_a_job_does_not_grow_with_the_number_of_trials(
    fileroot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_trials = 40
    trials = [make_trial(fileroot, f"t-{number:02}", mode="slurm", state="FAILED") for number in range(num_trials)]
    jobs: list[Job] = []
    for number, directory in enumerate(trials):
        facts = read_facts(directory)
        assert facts is not None
        gone = {"trial_uuid": f"gone-{number}", "directory": str(fileroot / "exp" / f"gone-{number}")}
        jobs += [
            queued_job(str(1000 + number), f"exp.t-{number:02}", trial_uuid=facts.uuid, directory=str(directory.path)),
            queued_job(str(2000 + number), f"exp.gone-{number}", **gone),
            queued_job(str(3000 + number), f"somebody-{number}"),
        ]
    asked, identify = Counter[str](), OwnJobs.identify

    def count_asking(own: OwnJobs, job: Job) -> JobNote | None:
        asked[job.job_id] += 1
        return identify(own, job)

    monkeypatch.setattr(OwnJobs, "identify", count_asking)
    monkeypatch.setattr(page_module, "CachedQueue", lambda client: Jobs(tuple(jobs)))
    found = rows(page(fileroot).all_trials())
    assert set(found) == {
        f"{kind}-{number:{width}}" for kind, width in (("t", "02"), ("gone", "")) for number in range(40)
    }
    monkeypatch.setattr(SlurmQueue, "is_here", lambda queue: True)
    assert "directory missing" in page(fileroot).trial_without_folder("exp/gone-7")
    assert page(fileroot).trial_without_folder("exp/t-07") == page(fileroot).trial_without_folder("gone-") == ""
    assert set(asked) == {str(1000 + number) for number in range(num_trials)}, (
        "a trial is asked about its own jobs only"
    )
    assert max(asked.values()) <= 2, asked.most_common(3)


class SilentRedis:
    """Takes connections and never answers; knows how many it had at the same time."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._server.getsockname()[1]
        self.most_at_once = 0
        self._stop_here, self._stop_there = socket.socketpair()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._take)
        thread.start()
        try:
            yield
        finally:
            self._stop_here.close()
            thread.join()
            self._stop_there.close()
            self._server.close()

    def _take(self) -> None:
        clients: set[socket.socket] = set()
        with selectors.DefaultSelector() as ready:
            ready.register(self._server, selectors.EVENT_READ)
            ready.register(self._stop_there, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self._stop_there:
                        for client in clients:
                            client.close()
                        return
                    if key.fileobj is self._server:
                        client = self._server.accept()[0]
                        clients.add(client)
                        ready.register(client, selectors.EVENT_READ)
                        self.most_at_once = max(self.most_at_once, len(clients))
                    elif isinstance(key.fileobj, socket.socket) and not key.fileobj.recv(1 << 16):
                        ready.unregister(key.fileobj)
                        clients.remove(key.fileobj)
                        key.fileobj.close()


def test_redis_servers_that_do_not_answer_are_waited_for_together(
    fileroot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_trials, redis = 24, SilentRedis()
    for number in range(num_trials):
        directory = make_trial(fileroot, f"t-{number}", state=None)
        Journal(directory.journal_path).append("redis_started", attempt=0)
        TrialSecrets.create(directory.secrets_path)
        directory.rendezvous_path.write_text(json.dumps({"host": "127.0.0.1", "port": redis.port}))
    monkeypatch.setattr(reader, "is_locked", lambda directory: True)  # their supervisors live
    with redis.running():
        found = rows(page(fileroot).all_trials())
    assert len(found) == num_trials and all("Redis does not answer" in row for row in found.values()), found
    # Each waits for two seconds: one after the other, or eight at a time, they never come to half of them.
    assert redis.most_at_once > num_trials // 2, redis.most_at_once
