"""How a worker ends: its exit code, and the word that it leaves for rl-status and rl-logs."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from corral.experiments.errors import ChangedInputError
from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.worker_specs import GenerationServerSpec
from corral.name_resolve.base import NameServiceUnavailableError
from corral.workers.lifecycle.worker import (
    BadConfigurationError,
    CannotContinueError,
    PromptsFailError,
    Worker,
    WorkerContext,
    request_last_commit,
    run_to_exit_code,
)
from tests.launcher.trials import StubTrial, make_plan, wait_until
from tests.name_services import MemoryNameService
from tests.workers.worker_context import worker_context


@pytest.fixture
def context(tmp_path: Path) -> Iterator[WorkerContext]:
    directory = TrialDirectory(tmp_path / "trial")
    directory.create()
    secrets = TrialSecrets.create(directory.secrets_path)
    plan = make_plan(directory.path)
    with worker_context(plan, "rollout_worker", names=MemoryNameService(), secrets=secrets) as context:
        yield context


def failing(error: Exception, *, when_made: bool) -> Callable[[WorkerContext], Worker]:
    class Failing(Worker):
        def __init__(self, context: WorkerContext) -> None:
            super().__init__(context)
            if when_made:
                raise error

        def run(self) -> None:
            raise error

    return Failing


@pytest.mark.parametrize("when_made", [True, False])
@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (ChangedInputError("data.jsonl has changed"), WorkerExit.BAD_CONFIGURATION, "data.jsonl has changed"),
        (BadConfigurationError("no such flag"), WorkerExit.BAD_CONFIGURATION, "no such flag"),
        (CannotContinueError("no commit\nin 3 epochs"), WorkerExit.CANNOT_CONTINUE, "no commit in 3 epochs"),
        (PromptsFailError("16 prompts in a row failed"), WorkerExit.ERROR, "16 prompts in a row failed"),
        (KeyError("answer"), WorkerExit.ERROR, "KeyError: 'answer'"),
    ],
)
def test_a_worker_that_fails_leaves_its_cause_also_if_it_could_not_be_made(
    context: WorkerContext, error: Exception, code: WorkerExit, word: str, when_made: bool
) -> None:
    assert run_to_exit_code(failing(error, when_made=when_made), context) == code
    assert context.trial.last_word_path("rollout_worker/0").read_text() == word


@pytest.mark.parametrize(
    ("number", "rule", "remedy"),
    [
        (errno.ENOENT, "No such file or directory", "put it back"),
        (errno.EPERM, "Operation not permitted", "let the user of the trial read and write there"),
        (errno.EROFS, "Read-only file system", "make the file system writable again"),
    ],
)
def test_a_file_that_a_worker_is_refused_is_told_with_a_way_out_and_no_traceback(
    context: WorkerContext, caplog: pytest.LogCaptureFixture, number: int, rule: str, remedy: str
) -> None:
    refused = OSError(number, os.strerror(number), "/m/config.json")
    assert run_to_exit_code(failing(refused, when_made=False), context) == WorkerExit.ERROR
    word = context.trial.last_word_path("rollout_worker/0").read_text()
    assert word.startswith(f"/m/config.json: {rule}; {remedy}, and the worker")
    assert word in caplog.text and "test_worker.py:" in caplog.text and "Traceback" not in caplog.text


def test_a_worker_whose_model_is_gone_says_so_and_is_not_started_again(context: WorkerContext, tmp_path: Path) -> None:
    def make(context: WorkerContext) -> Worker:
        context.specification(GenerationServerSpec)
        return failing(KeyError("x"), when_made=True)(context)

    server = replace(context, kind="generation_server")
    assert run_to_exit_code(make, server) == WorkerExit.BAD_CONFIGURATION
    word = context.trial.last_word_path("generation_server/0").read_text()
    assert "cannot be read any more: it has no config.json; put the old folder back, or submit a new trial" in word


def test_the_word_of_a_worker_holds_no_secret_and_is_short(context: WorkerContext) -> None:
    secret = context.secrets.http_api_key.reveal()
    run_to_exit_code(failing(RuntimeError(f"asked with {secret}: {'x' * 5000}"), when_made=False), context)
    word = context.trial.last_word_path("rollout_worker/0").read_text()
    assert secret not in word and word.startswith("RuntimeError: asked with ***: xxx") and len(word) == 1000


def test_a_worker_without_room_or_without_its_folder_leaves_no_word(context: WorkerContext) -> None:
    full = failing(OSError(errno.ENOSPC, "full"), when_made=False)
    assert run_to_exit_code(full, context) == WorkerExit.NO_ROOM
    assert not context.trial.last_word_path("rollout_worker/0").exists()
    shutil.rmtree(context.trial.path)
    assert run_to_exit_code(failing(KeyError("x"), when_made=False), context) == WorkerExit.ERROR


# --- what a worker follows in the name service ----------------------------------------------------------------------

DEADLINE_S = 60.0


class Follower(Worker):
    def run(self) -> None:
        raise AssertionError("its loops are run one by one")


class UnreliableNames(MemoryNameService):
    """Fails now and then."""

    num_failures = 0

    def changes(self, seen: Mapping[str, str], *, timeout_s: float) -> dict[str, str]:
        if self.num_failures > 0:
            self.num_failures -= 1
            raise NameServiceUnavailableError("away")
        return super().changes(seen, timeout_s=timeout_s)


def followed(tmp_path: Path, test: Callable[[UnreliableNames, dict[str, int]], Awaitable[None]]) -> None:
    """Run a test beside a worker that counts its looks at the roots `a` and `b/c`, which it does not do by itself."""
    trial = TrialDirectory(tmp_path / "exp" / "trial")
    trial.create()
    names, looks = UnreliableNames(), {"a": 0, "b/c": 0}

    async def look_at_a() -> None:
        looks["a"] += 1

    async def look_at_b() -> None:
        looks["b/c"] += 1

    async def run() -> None:
        secrets = TrialSecrets.create(trial.secrets_path)
        with worker_context(make_plan(trial.path), "rollout_worker", names=names, secrets=secrets) as context:
            follower = Follower(context)
            following = asyncio.create_task(
                follower.follow({"a": look_at_a, "b/c": look_at_b}, at_least_every_s=2 * DEADLINE_S)
            )
            await until(lambda: looks == {"a": 1, "b/c": 1})
            await test(names, looks)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_a_change_below_a_root_is_looked_at_without_waiting_for_the_next_look(tmp_path: Path) -> None:
    async def run(names: UnreliableNames, looks: dict[str, int]) -> None:
        names.add("b/c/0", "x")
        await until(lambda: looks["b/c"] == 2)
        assert looks["a"] == 1
        names.delete("b/c/0")
        await until(lambda: looks["b/c"] == 3)

    followed(tmp_path, run)


def test_what_changed_while_the_service_was_away_is_looked_at(tmp_path: Path) -> None:
    async def run(names: UnreliableNames, looks: dict[str, int]) -> None:
        names.num_failures = 2
        names.add("a/0", "x")
        await until(lambda: looks["a"] >= 2)
        before = looks["a"]
        names.add("a/0", "y")
        await until(lambda: looks["a"] > before and names.num_failures == 0)

    followed(tmp_path, run)


# --- SIGTERM in a step of SLURM -------------------------------------------------------------------------------------

WORKER = """
import asyncio, signal, sys, threading
from pathlib import Path
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.workers.lifecycle.worker import notice_of
from corral.workers.lifecycle.worker import StopRequested, install_signal_handlers, run_async

directory, kind = TrialDirectory(Path(sys.argv[1])), sys.argv[2]
stopping = threading.Event()

async def work():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: print("works on", flush=True))
    print("works", flush=True)
    while True:
        await asyncio.sleep(600.0)

try:
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    install_signal_handlers(stopping, notice=notice_of(plan.mode, directory, kind, stop_grace_s=1.0))
    run_async(work(), stopping)
except StopRequested:
    print("leaves")
"""

LEAVING = """
stopping.set()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.raise_signal(number)
print("cleans up", flush=True)
"""


@pytest.mark.parametrize(
    ("mode", "kind", "is_told"),
    [("slurm", "master_worker", True), ("slurm", "model_worker", False), ("local", "master_worker", False)],
)
def test_only_where_slurm_sends_it_by_itself_sigterm_is_a_notice(
    tmp_path: Path, mode: str, kind: str, is_told: bool
) -> None:
    trial = StubTrial(tmp_path, {}, mode=mode, model_workers=1, servers=0)
    command = [sys.executable, "-c", WORKER, str(trial.directory.path), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "works\n"
        worker.send_signal(signal.SIGTERM)
        if mode == "slurm":
            if is_told:
                request = wait_until(trial.directory.read_stop_request, "the request")
                assert (request.then, request.is_notice) == ("requeue", True)
            worker.send_signal(signal.SIGUSR1)
            assert worker.stdout.readline() == "works on\n"
            worker.send_signal(signal.SIGINT)
        assert worker.communicate(timeout=20)[0] == "leaves\n"
    assert worker.returncode == 0
    assert (trial.directory.read_stop_request() is not None) is is_told


def test_who_asks_a_worker_to_leave_that_has_ended_its_work_does_not_kill_it(tmp_path: Path) -> None:
    """The supervisor asks everybody once the master has said that all is done, which is then about to leave."""
    trial = StubTrial(tmp_path, {}, mode="local", model_workers=1, servers=0)
    ending = WORKER.replace('print("works", flush=True)', "return") + LEAVING
    command = [sys.executable, "-c", ending, str(trial.directory.path), "master_worker"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "cleans up\n"), ended.stderr


def test_a_notice_does_not_take_the_place_of_what_somebody_asked_for(tmp_path: Path) -> None:
    trial = StubTrial(tmp_path, {}, mode="slurm", model_workers=1, servers=0)
    final = StopRequest(requested_at=0.0, by="me@here", now=True, grace_s=5.0)
    trial.directory.write_stop_request(final)
    request_last_commit(trial.directory, stop_grace_s=5.0)
    assert trial.directory.read_stop_request() == final
    assert not list(trial.directory.control_path.glob(".*"))
