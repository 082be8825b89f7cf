"""What a worker leaves goes with it, whoever is killed: its processes, its temporary files, its names in memory."""

import ast
import mmap
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.experiments.trial import leftovers
from corral.launcher.runners.guard import guarded
from corral.launcher.runners.runner import LocalRunner
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE, children_of, process_start_ticks, sweep
from tests.launcher.trials import wait_until

# Leaves the session, forgets its environment, as a server that gives itself a title does, and tells who it is.
STRAY = """
import ctypes, os, pathlib, sys, time
if "setsid" in sys.argv: os.setsid()
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""
WORKER = """
import os, pathlib, subprocess, sys, tempfile, time
from multiprocessing import get_context
from corral.experiments.trial import leftovers
told = pathlib.Path(sys.argv[1])
subprocess.Popen([sys.executable, "-c", sys.argv[2], str(told / "stray"), *sys.argv[3:]], env={})
held = get_context("spawn").Semaphore()
(pathlib.Path(tempfile.gettempdir()) / "file").write_text("x")
(told / "temporary").write_text(tempfile.gettempdir())
(told / "worker").write_text(str(os.getpid()))
time.sleep(600)
"""


class Guarded:
    """A worker of this test under its guard, started as the local runner does, with a stray process of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
        self.uuid = uuid.uuid4().hex
        monkeypatch.setenv(TRIAL_UUID_VARIABLE, self.uuid)
        self.names = set(os.listdir("/dev/shm"))
        command = (sys.executable, "-c", WORKER, str(folder), STRAY, *options)
        runner = LocalRunner(bind_address="auto", gpus_by_worker={})
        self.task = runner.start("rollout_worker/0", command, environment={}, log_path=folder / "log")
        told = [folder / name for name in ("stray", "worker", "temporary")]
        wait_until(lambda: all(path.exists() and path.read_text() for path in told), "the worker")
        self.stray, self.worker = (int(path.read_text()) for path in told[:2])
        self.temporary = Path(told[2].read_text())

    def check_nothing_is_left(self) -> None:
        for pid in (self.stray, self.worker, self.task.pid):
            wait_until(lambda pid=pid: process_start_ticks(pid) is None, f"the end of {pid}")
        wait_until(lambda: not self.temporary.exists(), "its temporary folder")
        assert not [name for name in set(os.listdir("/dev/shm")) - self.names if name.startswith("sem.mp-")]


def test_a_worker_has_what_the_hard_limits_allow_whatever_the_soft_ones_of_the_login_shell() -> None:
    show = (
        "import resource, sys; "
        "print(*[resource.getrlimit(getattr(resource, f'RLIMIT_{name}')) for name in sys.argv[1:]], sep=';')"
    )
    names = {"CPU": "-t 600", "AS": "-v 9000000", "DATA": "-d 9000000", "FSIZE": "-f 9000000", "NPROC": "-u 5000"}
    limits = "".join(f"ulimit -S {option}; " for option in (*names.values(), "-s 512", "-n 256"))
    command = shlex.join(guarded([sys.executable, "-c", show, *names, "STACK", "NOFILE"]))
    done = subprocess.run(["bash", "-c", f"{limits} exec {command}"], capture_output=True, text=True, timeout=60)
    *raised, stack, files = [ast.literal_eval(pair) for pair in done.stdout.strip().split(";")]
    assert all(soft == hard for soft, hard in raised), dict(zip(names, raised, strict=True))
    assert stack[0] == 8 << 20  # an unlimited one is no default of threads
    assert files[0] == min(files[1], 1 << 20)


def test_what_a_worker_asks_of_its_own_node_goes_to_no_proxy() -> None:
    command = guarded([sys.executable, "-c", "import os; print(os.environ['no_proxy'])"])
    environment = {**os.environ, "no_proxy": "site.example", "CORRAL_BIND_ADDRESS": "10.1.2.3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "site.example,127.0.0.1,localhost,::1,10.1.2.3", done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_leaves_neither_processes_nor_files_nor_semaphores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    guarded_worker = Guarded(tmp_path, monkeypatch, "setsid")
    os.kill(guarded_worker.worker, number)
    assert wait_until(lambda: guarded_worker.task.poll(), "its end") == -number
    guarded_worker.check_nothing_is_left()


def test_what_a_worker_started_ends_when_the_supervisor_kills_it_though_its_guard_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded_worker = Guarded(tmp_path, monkeypatch, "setsid")
    os.kill(guarded_worker.task.pid, signal.SIGSTOP)
    guarded_worker.task.end(kill=True)
    assert wait_until(lambda: guarded_worker.task.poll(), "its end") == -signal.SIGKILL
    guarded_worker.check_nothing_is_left()


def test_a_guard_that_is_killed_takes_the_worker_and_their_session_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded_worker = Guarded(tmp_path, monkeypatch)
    os.kill(guarded_worker.task.pid, signal.SIGKILL)
    assert wait_until(lambda: guarded_worker.task.poll(), "its end") == -signal.SIGKILL
    wait_until(lambda: process_start_ticks(guarded_worker.stray) is None, "the end of the stray")
    sweep()  # or another test's, which may have begun before and ends after it
    wait_until(lambda: not guarded_worker.temporary.exists(), "its temporary folder")


def test_a_guard_outlives_its_parent_only_to_end_all_that_its_worker_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRIAL_UUID_VARIABLE, uuid.uuid4().hex)
    guard = guarded([sys.executable, "-c", WORKER, str(tmp_path), STRAY, "setsid"])
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({list(guard)!r}, start_new_session=True)"]
    )
    told = [tmp_path / name for name in ("stray", "worker", "temporary")]
    wait_until(lambda: all(path.exists() and path.read_text() for path in told), "the worker")
    pids = [*children_of(parent.pid), *(int(path.read_text()) for path in told[:2])]
    parent.kill()
    parent.wait()
    for pid in pids:
        wait_until(lambda pid=pid: process_start_ticks(pid) is None, f"the end of {pid}")
    wait_until(lambda: not Path(told[2].read_text()).exists(), "its temporary folder")


@pytest.fixture
def stray(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose session nobody leads any more, and that tells nobody its environment."""
    process = subprocess.Popen([sys.executable, "-c", STRAY, str(tmp_path / "told")], env={}, start_new_session=True)
    wait_until(lambda: (tmp_path / "told").exists(), "the stray")
    yield process
    process.kill()
    process.wait()


def test_a_sweep_ends_the_session_of_a_dead_owner_and_never_that_of_a_living_one(
    stray: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    record = leftovers.begin("f" * 32, session=stray.pid, start_ticks=process_start_ticks(stray.pid) or 0)
    record.note(folder)
    sweep()
    assert stray.poll() is None and folder.exists()
    os.close(record.descriptor)
    sweep()
    assert stray.wait(10) == -signal.SIGKILL and not folder.exists() and not record.path.exists()


def test_a_sweep_spares_a_session_of_the_same_id_that_is_another(stray: subprocess.Popen[bytes]) -> None:
    record = leftovers.begin("f" * 32, session=stray.pid, start_ticks=(process_start_ticks(stray.pid) or 0) - 1)
    os.close(record.descriptor)
    sweep()
    assert stray.poll() is None


def test_secrets_go_with_their_owner_and_those_made_anew_stay(tmp_path: Path) -> None:
    for name, is_renewed in (("old", False), ("new", True)):
        path = tmp_path / name / "secrets.json"
        path.parent.mkdir()
        path.write_text("first")
        record = leftovers.begin("f" * 32)
        leftovers.note_secrets(record, path)
        if is_renewed:
            os.utime(path, ns=(0, 0))
        os.close(record.descriptor)
    sweep()
    assert not (tmp_path / "old").exists() and (tmp_path / "new" / "secrets.json").exists()


def test_names_whose_makers_have_died_go_and_those_that_somebody_maps_stay(tmp_path: Path) -> None:
    names = ("sem.mp-dead", "sglang_loads_dead", "sem.mp-used", "sem.mp-before", "somebody's")
    for name in names:
        (tmp_path / name).write_text("x")
    os.utime(tmp_path / "sem.mp-before", (0, 0))
    os.rename(tmp_path / "sem.mp-used", tmp_path / "sem.made")  # as the C library makes a semaphore
    with open(tmp_path / "sem.made") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        os.link(tmp_path / "sem.made", tmp_path / "sem.mp-used")
        os.unlink(tmp_path / "sem.made")
        leftovers.remove_unused_names(since=1.0, memory=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names[2:])
