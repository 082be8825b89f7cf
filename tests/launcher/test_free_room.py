"""A file system without room is told of; one with room, and one that does not count its files, are not."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from corral.experiments.exit_codes import CommandExit
from corral.launcher.commands.logs import logs
from corral.launcher.commands.status import status
from corral.launcher.status.reader import why_no_room
from tests.launcher.conftest import MakeTrial

ROOMY = {"f_frsize": 4096, "f_blocks": 10_000, "f_bavail": 5_000, "f_files": 100, "f_favail": 50}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"f_files": 0, "f_favail": 0}, ""),
        ({"f_bavail": 0}, "is full: 0.0 MB of 41.0 MB are free; make room"),
        ({"f_bavail": 1_000}, "is full: 4.1 MB of 41.0 MB are free; make room"),
        ({"f_favail": 0}, "takes no more files: none of 100 is free; make room"),
    ],
)
def test_what_is_full_is_said_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**ROOMY | changes))
    said = why_no_room(tmp_path)
    assert said == "" if not words else words in said and str(tmp_path) in said


def test_a_full_disk_is_told_by_what_looks_for_trouble_and_for_errors(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = make_trial({"master_worker/0": ["master"]})
    trial.start()
    trial.wait_for("redis_started")
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**ROOMY | {"f_bavail": 0}))
    name = str(trial.directory.path)
    full = f"the disk of {name} is full: 0.0 MB of 41.0 MB are free; make room, and the trial goes on by itself"
    with pytest.raises(typer.Exit) as ended:
        status(name, check=True)
    assert ended.value.exit_code == CommandExit.SUFFERS and full in capsys.readouterr().out.splitlines()
    logs(name, errors=True)
    assert capsys.readouterr().out.splitlines()[:2] == [f"trouble: {full}", "no worker has failed"]
