"""A process from which secrets are hidden sees neither their folder nor a process that could tell of it."""

import logging
import os
import signal
import subprocess
from pathlib import Path

import pytest

from corral.workers.sandbox.hidden_secrets import NOTHING_HIDDEN, HiddenSecrets, hide_secrets
from tests.workers.sandbox.processes import processes_with, wait_until

KEY = "the trial's key"


@pytest.fixture
def secrets(tmp_path: Path) -> HiddenSecrets:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "keys").write_text(KEY)
    hidden = hide_secrets(tmp_path / "secrets")
    assert hidden.hidden, "bubblewrap hides nothing here"
    return hidden


def said_by(secrets: HiddenSecrets, script: str, *arguments: str) -> str:
    command = secrets.around(["/bin/sh", "-c", script, "sh", *arguments])
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_the_folder_is_empty_and_everything_else_is_there(secrets: HiddenSecrets, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("rows")
    paths = [str(tmp_path / name) for name in ("secrets", "data", "out")]
    assert said_by(secrets, 'ls "$1"; cat "$2"; echo mine >"$3"', *paths) == "rows"
    assert (tmp_path / "out").read_text() == "mine\n"


def test_no_process_is_there_whose_memory_or_files_it_could_look_into(secrets: HiddenSecrets, tmp_path: Path) -> None:
    me, folder = str(os.getpid()), str(tmp_path / "secrets")
    script = 'ls -d /proc/[0-9]* | wc -l; cat /proc/*/root"$1"/keys /proc/"$2"/environ 2>&1; kill -0 "$2" 2>&1; true'
    found = said_by(secrets, script, folder, me)
    assert int(found.split()[0]) < 10
    assert KEY not in found and "No such process" in found


def test_it_is_ended_with_all_that_it_started(secrets: HiddenSecrets, tmp_path: Path) -> None:
    word = str(tmp_path)  # in no other command line
    script = "setsid sh -c 'while :; do sleep 1; done' \"$1\" & echo; while :; do sleep 1; done"
    command = secrets.around(["/bin/sh", "-c", script, "sh", word])
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        wait_until(lambda: len(processes_with(word)) >= 3, "what it starts runs")
        os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not processes_with(word), "nothing of it is left")


def test_it_says_by_which_signal_it_was_ended(secrets: HiddenSecrets) -> None:
    ended = subprocess.run(secrets.around(["/bin/sh", "-c", "kill -9 $$"]), timeout=60)
    assert secrets.exit_code(ended.returncode) == -signal.SIGKILL
    assert secrets.exit_code(3) == 3 and NOTHING_HIDDEN.exit_code(137) == 137


def test_where_nothing_can_be_hidden_the_log_says_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert hide_secrets(tmp_path / "secrets").around(["true"]) == ["true"]
    assert f"could read {tmp_path / 'secrets'}" in caplog.text and "install the package bubblewrap" in caplog.text
