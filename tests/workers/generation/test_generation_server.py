"""The worker around a server of SGLang: restarts, the budget for them, and the record by which others find it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.trial.processes import process_start_ticks
from corral.name_resolve.base import NameNotFoundError
from corral.name_resolve.keys import TrialKeys
from corral.workers.generation.generation_server import MAX_RESTARTS, GenerationServer
from corral.workers.generation.sglang_process import SglangProcess
from corral.workers.lifecycle.worker import run_to_exit_code
from tests.launcher.trials import make_plan
from tests.name_services import MemoryNameService, MemoryStore
from tests.workers.generation.servers import DEADLINE_S, server_spec, wait_until
from tests.workers.worker_context import worker_context


class Rig:
    """A trial of one generation server whose SGLang is a stub, unless the settings name another Python."""

    def __init__(self, folder: Path, **sglang: Any) -> None:
        self.folder = folder
        python = folder / "python"
        stub = Path(__file__).parent / "stub_sglang.py"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{stub}" "{folder}" "$@"\n')
        python.chmod(0o700)
        self.trial = TrialDirectory(folder / "exp" / "trial")
        self.trial.create()
        self.trial.start_attempt_logs(0)
        TrialSecrets.create(self.trial.secrets_path)
        (folder / "model").mkdir(exist_ok=True)
        if not (config := folder / "model" / "config.json").exists():
            config.write_text("{}")
        spec = server_spec("sglang", folder / "model", **{"python": str(python), **sglang})
        self.plan = make_plan(self.trial.path, model_workers=1).model_copy(update={"workers": [spec]})
        self.keys = TrialKeys(self.plan.trial.uuid)
        self.names = MemoryNameService(MemoryStore())

    def run(self) -> int:
        """The worker's exit code."""
        secrets = TrialSecrets.load(self.trial.secrets_path)
        with worker_context(self.plan, "generation_server", names=self.names, secrets=secrets) as context:
            exit_code = run_to_exit_code(GenerationServer, context)
            self.said = context.presence.snapshot()
            """Last, of itself."""
            return exit_code

    def starts(self) -> list[int]:
        """Process ids of the servers, in the order in which they were started."""
        path = self.folder / "starts"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def record(self) -> dict[str, str]:
        """By which the manager finds the server; empty while there is none."""
        try:
            return dict(json.loads(self.names.get(self.keys.generation_server(0))))
        except NameNotFoundError:
            return {}


def test_a_server_that_is_killed_is_started_again_under_another_name(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    def kill_twice() -> list[dict[str, str]]:
        seen = []
        try:
            for count in (1, 2, 3):
                wait_until(lambda count=count: len(rig.starts()) == count and bool(rig.record()), "a record")  # type: ignore[misc]
                seen.append(rig.record())
                if count < 3:
                    os.kill(rig.starts()[-1], signal.SIGKILL)
                    wait_until(lambda: rig.record() != seen[-1], "the record to go")
        finally:
            os.kill(os.getpid(), signal.SIGINT)
        return seen

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_twice)
        assert rig.run() == WorkerExit.DONE
        records = killing.result(DEADLINE_S)
    assert len({record["incarnation"] for record in records}) == 3
    assert len({record["control"] for record in records}) == 1  # the worker itself was there all the time
    assert {record["place"] for record in records} == {""}  # by shared_memory hosts give each other nothing
    assert rig.record() == {}
    wait_until(lambda: not Path(f"/proc/{rig.starts()[-1]}").exists(), "the last server to be gone")


def test_a_spent_budget_ends_the_worker_with_the_servers_last_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path)
    (tmp_path / "exit_code").write_text("3")
    assert rig.run() == WorkerExit.ERROR
    assert rig.said.restarts == MAX_RESTARTS
    assert "with exit code 3 after OSError: [Errno 98] Address already in use;" in rig.said.waiting_for
    assert len(rig.starts()) == MAX_RESTARTS + 1
    for words in ("with exit code 3", "the last words of the stub", "its 3 restarts are spent"):
        assert words in caplog.text
    assert "the last words of the stub" in rig.trial.worker_log(0, "sglang", 0).read_text()


def test_flags_that_sglang_does_not_know_are_the_users_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path, flags={"no-such-flag": 7})
    (tmp_path / "exit_code").write_text("2")  # argparse's
    assert rig.run() == WorkerExit.BAD_CONFIGURATION
    assert len(rig.starts()) == 1


def test_an_interpreter_that_is_not_there_is_the_users_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path)
    (tmp_path / "python").unlink()
    assert rig.run() == WorkerExit.BAD_CONFIGURATION
    assert "sglang.python" in caplog.text and "make sglang" in caplog.text


def test_a_server_does_not_outlive_its_worker_even_if_that_is_killed(tmp_path: Path) -> None:
    starter = f"""
import sys, time
from pathlib import Path
from corral.workers.generation.sglang_process import SglangProcess
command = [sys.executable, "-c", "import time; time.sleep(600)"]
process = SglangProcess(command, environment={{}}, log_path=Path({str(tmp_path / "log")!r}), scrub=str)
print(process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        server = int(worker.stdout.readline())
        assert process_start_ticks(server) is not None
        worker.kill()
    wait_until(lambda: process_start_ticks(server) is None, "the server to be gone")


def test_what_a_server_leaves_goes_with_it_and_its_first_error_is_told(tmp_path: Path) -> None:
    log, told = tmp_path / "log", tmp_path / "told"
    left = Path("/dev/shm", f"sem.mp-{uuid.uuid4().hex[:8]}")
    program = f"""
import os, pathlib, signal, tempfile
folder = tempfile.mkdtemp()
pathlib.Path({str(left)!r}).write_text("x")
print("requests.exceptions.ConnectionError: too early\\nThe server is fired up and ready to roll!")
print("Traceback (most recent call last):\\n  File x\\n[2026-01-01 10:00:00 TP0] Scheduler hit an exception: ...")
print("torch.OutOfMemoryError: no room")
print("[2026-01-01 10:00:00] RuntimeError: another one", flush=True)
pathlib.Path({str(told)!r}).write_text(folder)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = SglangProcess([sys.executable, "-c", program], environment={}, log_path=log, scrub=str)
    wait_until(lambda: process.poll() is not None, "its end")
    asyncio.run(process.stop())
    assert process.first_error == "torch.OutOfMemoryError: no room"
    assert not left.exists() and not Path(told.read_text()).parent.exists()


def test_a_server_whose_log_cannot_be_written_goes_on_and_its_error_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, go_on = tmp_path / "log", tmp_path / "go on"
    log.symlink_to("/dev/full")
    program = f"""
import pathlib, time
for number in range(5000):
    print("line", number, "x" * 100)
print("torch.OutOfMemoryError: no room", flush=True)
while not pathlib.Path({str(go_on)!r}).exists():
    time.sleep(0.01)
print("The server is fired up and ready to roll!\\nOSError: another one")
"""
    process = SglangProcess([sys.executable, "-c", program], environment={}, log_path=log, scrub=str)
    wait_until(lambda: process.first_error != "", "its first error")
    assert process.poll() is None and len(caplog.records) == 1
    log.unlink()
    go_on.touch()
    wait_until(lambda: process.poll() is not None, "its end")
    asyncio.run(process.stop())
    assert process.poll() == 0 and process.first_error == "OSError: another one"


def test_a_server_that_ignores_the_order_to_end_is_killed_with_its_children(tmp_path: Path) -> None:
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, 'alpha', flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    process = SglangProcess(
        [sys.executable, "-c", stubborn], environment={}, log_path=log, scrub=lambda line: line.replace("alpha", "***")
    )
    wait_until(lambda: log.exists() and log.read_text().endswith("***\n"), "its first line")
    child = int(log.read_text().split()[0])
    asyncio.run(process.stop())
    assert process.poll() == -signal.SIGKILL
    wait_until(lambda: process_start_ticks(child) is None, "its child to be gone")
