"""How a worker ends: its exit code, and the word that it leaves for rl-status and rl-logs."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from corral.experiments.errors import ChangedInputError
from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.worker_specs import GenerationServerSpec
from corral.workers.lifecycle.worker import (
    BadConfigurationError,
    CannotContinueError,
    PromptsFailError,
    Worker,
    WorkerContext,
    run_to_exit_code,
)
from tests.launcher.trials import make_plan
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
    assert word in caplog.text and "test_endings.py:" in caplog.text and "Traceback" not in caplog.text


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
