"""The shared answer of squeue: asked for rarely, kept through outages, never older than a submission."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.launcher.slurm.client import SlurmUnreachableError
from corral.launcher.slurm.job_queue import FRESH_S, CachedQueue, QueueAnswer, SlurmQueue, cache_path, pause_after
from corral.launcher.slurm.verdict import Job
from tests.launcher.jobs import job_of


class Controller(SlurmQueue):
    """A controller that answers with as many jobs as it was asked times, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.is_down = False
        self.pause_s = 0.0

    def jobs(self) -> list[Job]:
        self.calls += 1
        time.sleep(self.pause_s)
        if self.is_down:
            raise SlurmUnreachableError("squeue failed with exit 1: connect failure\n  hint: log in elsewhere")
        return [job_of(str(self.calls), "RUNNING", nodes="n1", tag={"corral": 1})]


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def queue(tmp_path: Path, controller: Controller, clock: Clock) -> CachedQueue:
    return CachedQueue(controller, path=tmp_path / "corral" / "queue-x.json", clock=clock)


def test_an_answer_serves_for_five_seconds(queue: CachedQueue, controller: Controller, clock: Clock) -> None:
    assert [job.job_id for job in queue.look().jobs] == ["1"]
    clock.now += FRESH_S - 0.1
    assert queue.look().asked_at == 1000.0 and controller.calls == 1
    clock.now += 0.2
    assert [job.job_id for job in queue.look().jobs] == ["2"]


def test_an_answer_from_before_a_submission_does_not_serve_for_it(
    queue: CachedQueue, controller: Controller, clock: Clock
) -> None:
    queue.look()
    clock.now += 1.0
    queue.look(newer_than=1000.5)
    assert controller.calls == 2
    queue.look(newer_than=1000.5)
    queue.look(newer_than=5000.0)  # another machine's clock
    assert controller.calls == 2


def test_many_commands_at_once_make_one_call(tmp_path: Path, controller: Controller) -> None:
    path, answers = tmp_path / "queue-x.json", []
    controller.pause_s = 0.2
    barrier = threading.Barrier(10)

    def look() -> None:
        barrier.wait(10)
        answers.append(CachedQueue(controller, path=path).look())

    threads = [threading.Thread(target=look) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert controller.calls == 1
    assert [[job.job_id for job in answer.jobs] for answer in answers] == [["1"]] * 10


def test_what_was_known_stays_while_the_controller_is_down_and_it_is_asked_ever_less_often(
    queue: CachedQueue, controller: Controller, clock: Clock
) -> None:
    queue.look()
    controller.is_down = True
    clock.now = 1010.0
    answer = queue.look()
    assert [job.job_id for job in answer.jobs] == ["1"]
    assert (answer.asked_at, answer.unreachable_since) == (1000.0, 1010.0)
    assert answer.error == "squeue failed with exit 1: connect failure"
    asked_at = []
    for _ in range(300):
        clock.now += 1.0
        before = controller.calls
        assert queue.look().unreachable_since == 1010.0
        if controller.calls > before:
            asked_at.append(clock.now - 1010.0)
    assert asked_at == [5.0, 15.0, 35.0, 75.0, 135.0, 195.0, 255.0]
    controller.is_down = False
    clock.now += 60.0
    assert queue.look().unreachable_since is None


def test_the_file_is_for_its_owner_only(queue: CachedQueue, tmp_path: Path) -> None:
    queue.look()
    (file,) = (tmp_path / "corral").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"failures": "x"}', b"\xff"])
def test_a_broken_file_is_as_good_as_none(
    content: bytes, queue: CachedQueue, controller: Controller, tmp_path: Path
) -> None:
    queue.look()
    (tmp_path / "corral" / "queue-x.json").write_bytes(content)
    assert [job.job_id for job in queue.look().jobs] == ["2"]


def test_without_a_place_for_the_file_slurm_is_asked_directly(controller: Controller, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    queue = CachedQueue(controller, path=tmp_path / "file" / "queue.json")
    assert queue.look().jobs and queue.look().jobs
    assert controller.calls == 2


def test_each_cluster_has_its_own_answer_also_where_two_share_a_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    here, own, cluster = os.uname(), cache_path(SlurmQueue()), SlurmQueue()
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=f"login.of-another-than-{here.nodename}"))
    paths = {own, cache_path(cluster)}  # both clusters have their configuration where SLURM looks for it by default
    for configuration in ("/a/slurm.conf", "/b/slurm.conf"):
        monkeypatch.setenv("SLURM_CONF", configuration)
        paths.add(cache_path(cluster))
    assert len(paths) == 4 and {path.parent for path in paths} == {tmp_path / "corral"}


@given(st.integers(1, 10_000))
def test_pauses_grow_and_end_at_a_minute(failures: int) -> None:
    assert FRESH_S <= pause_after(failures) <= pause_after(failures + 1) <= 60.0


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.floats(0, 2000)), max_size=30))
def test_slurm_is_never_asked_twice_within_five_seconds_but_for_a_submission(
    looks: list[tuple[float, bool, float]],
) -> None:
    memory, controller, clock, last_ask = QueueAnswer(), Controller(), Clock(), None
    for pause_s, is_up, newer_than in looks:
        now = clock.now = clock.now + pause_s
        if memory.is_due(now, newer_than):
            was_submitted = memory.asked_at is not None and memory.asked_at < newer_than <= now
            assert last_ask is None or now - last_ask >= FRESH_S or was_submitted
            controller.is_down = not is_up
            memory = memory.after_asking(controller, clock)
            last_ask = now
