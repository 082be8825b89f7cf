"""What the file system adds: separate processes, modes, foreign files, locks."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corral.name_resolve import FileNameService, NameServiceError, NameServiceUnavailableError
from corral.name_resolve import file as file_module

COUNT = """
import sys
from corral.name_resolve import FileNameService
with FileNameService(sys.argv[1]) as service:
    for _ in range(100):
        service.incr("n")
"""


def test_processes_that_count_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    counters = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path / "names")]) for _ in range(3)]
    assert [counter.wait(60) for counter in counters] == [0, 0, 0]
    assert FileNameService(tmp_path / "names").get("n") == "300"


def test_records_and_directory_are_for_this_user_only(tmp_path: Path) -> None:
    with FileNameService(tmp_path / "names") as service:
        service.add("a/b", "v")
        service.add("a/b", "w", replace=True)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "names").iterdir()}
    assert modes == {"a%b": 0o600, "~lock": 0o600}
    assert (tmp_path / "names").stat().st_mode & 0o777 == 0o700


def test_a_file_that_is_no_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    with FileNameService(tmp_path) as service:
        (tmp_path / "a").write_text("[1]")
        with pytest.raises(NameServiceError, match=f"{tmp_path}/a is not a record"):
            service.get("a")


def test_a_lock_that_never_comes_free_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "_LOCK_TIMEOUT_S", 0.1)
    with FileNameService(tmp_path) as service:
        descriptor = os.open(tmp_path / "~lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(NameServiceUnavailableError, match="~lock was held by another process"):
            service.add("a", "v")
        os.close(descriptor)
        service.add("a", "v")


def test_a_name_that_appears_past_the_lock_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On file systems whose locks stay on one host, link(2) still decides who was first."""
    with FileNameService(tmp_path / "ours") as ours, FileNameService(tmp_path / "theirs") as theirs:
        theirs.add("a", "theirs")
        create = ours._table.create

        def create_late(name: str, record: object) -> bool:
            if not (tmp_path / "ours" / "a").exists():
                os.link(tmp_path / "theirs" / "a", tmp_path / "ours" / "a")
            return create(name, record)  # type: ignore[arg-type]

        monkeypatch.setattr(ours._table, "create", create_late)
        with pytest.raises(NameServiceError, match="already exists"):
            ours.add("a", "ours")
        assert ours.get("a") == "theirs"
