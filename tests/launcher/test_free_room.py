"""A file system without room is told of; one with room, and one that does not count its files, are not."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corral.launcher.files.free_room import why_no_room

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
