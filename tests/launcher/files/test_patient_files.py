"""Commands beside a mount that hangs: they end with its path and a way out, and print what they could read before."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corral.experiments.exit_codes import CommandExit
from corral.experiments.trial.attempts import record_attempt
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.commands.common import run
from corral.launcher.commands.logs import logs
from corral.launcher.commands.status import status
from corral.launcher.commands.stop import stop
from corral.launcher.files import file_thread, lookout
from corral.launcher.files.file_thread import PatientFiles
from corral.launcher.follow import follow
from corral.launcher.logs import lines
from corral.launcher.logs.files import LinePrinter, LogFile
from corral.launcher.logs.lines import LineFilter, end_of_lines, select_lines
from tests.launcher.supervisor.broken_files import hanging
from tests.launcher.trials import make_plan


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((file_thread, "_COMMANDS_PATIENCE_S"), (lookout, "_PATIENCE_S")):
        monkeypatch.setattr(module, name, 0.5)


@pytest.fixture
def directory(tmp_path: Path) -> TrialDirectory:
    """A trial on this machine that was started, and whose supervisor is gone."""
    directory = TrialDirectory(tmp_path / "exp" / "trial")
    directory.create()
    directory.plan_path.write_bytes(make_plan(directory.path).to_json())
    record_attempt(directory, attempt=0, resume=False, mode="local")
    directory.start_attempt_logs(0)
    for worker in ("master_worker", "rollout_worker"):
        directory.worker_log(0, worker, 0).write_text(f"of {worker}\n")
    return directory


@pytest.fixture
def ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that a mount stops; what it said before."""

    def check(command: Callable[..., None], *arguments: str, because_of: Path) -> str:
        with pytest.raises(SystemExit) as ended:
            run(command, [*arguments, "--fileroot", str(tmp_path)])
        said = capsys.readouterr()
        assert ended.value.code == CommandExit.ERROR, said
        (error,) = said.err.splitlines()
        assert error.startswith(f"error: {because_of} does not answer") and "is its file system there?" in error
        assert "Try again once ls answers there" in error and "scancel" in error
        return said.out

    return check


@pytest.mark.parametrize(
    ("command", "options"),
    [(logs, []), (logs, ["-f"]), (logs, ["--errors"]), (stop, []), (stop, ["--now"]), (stop, ["--requeue"])]
    + [(stop, ["--group", "generation_server"]), (status, ["--wait"])],
)
def test_a_trial_on_a_mount_that_hangs_ends_each_command(
    directory: TrialDirectory, ends: Callable[..., str], command: Callable[..., None], options: list[str]
) -> None:
    with hanging(directory.plan_path):
        ends(command, "exp/trial", *options, because_of=directory.path)


def test_the_path_is_named_as_far_as_it_is_known(directory: TrialDirectory, ends: Callable[..., str]) -> None:
    with hanging(directory.plan_path):
        ends(logs, "trial", because_of=directory.path.parent.parent / "*" / "trial")
        ends(logs, str(directory.path), because_of=directory.path)


@pytest.mark.parametrize("options", [[], ["--since", "1h"], ["--grep", "nothing"]])
def test_a_log_that_hangs_is_named_and_those_before_it_are_printed(
    directory: TrialDirectory, ends: Callable[..., str], options: list[str]
) -> None:
    log = directory.worker_log(0, "rollout_worker", 0)
    with hanging(log):
        printed = ends(logs, "trial", *options, because_of=log)
    assert printed == ("" if "--grep" in options else "master_worker/0  | of master_worker\n")


def test_a_record_of_an_end_that_hangs_ends_the_search_for_errors(
    directory: TrialDirectory, ends: Callable[..., str]
) -> None:
    with hanging(directory.control_path / "end-0.json"):
        ends(logs, "trial", "--errors", because_of=directory.path)


def test_following_ends_when_a_log_hangs(directory: TrialDirectory) -> None:
    paths = [directory.worker_log(0, worker, 0) for worker in ("master_worker", "rollout_worker")]
    found = [LogFile(label=path.stem, path=path) for path in paths]
    printed: list[str] = []
    with hanging(paths[1]), pytest.raises(TimeoutError, match=str(paths[1])):
        printer = LinePrinter(write=printed.append, has_prefix=False)
        follow(lambda: found, printer, has_ended=lambda: False, read_before={})
    assert printed == ["of master_worker"]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Lets a method of trial directories hang until the test is over."""
    released = threading.Event()
    yield lambda name: monkeypatch.setattr(TrialDirectory, name, lambda *_, **__: released.wait())
    released.set()


def test_a_stop_that_cannot_be_written_ends_the_command(
    directory: TrialDirectory, ends: Callable[..., str], stuck: Callable[[str], None]
) -> None:
    stuck("write_stop_request")
    ends(stop, "trial", because_of=directory.path)


def test_lines_are_the_same_whoever_reads_them(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    written = [f"2026-11-21 08:14:{number % 60:02},000 line {number} {'x' * 50}" for number in range(5_000)]
    log.write_text("\n".join([*written, "not whole"]))
    assert log.stat().st_size > 4 * lines._CHUNK_BYTES
    for chosen in (LineFilter(), LineFilter(since=0.0)):
        for count in (None, 3):
            patiently = select_lines(log, count=count, chosen=chosen, files=PatientFiles())
            assert patiently == [*written, "not whole"][-(count or 0) :]
    assert end_of_lines(log, files=PatientFiles()) == log.stat().st_size - len("not whole")
    assert select_lines(tmp_path / "none.log", count=None, chosen=LineFilter(), files=PatientFiles()) == []
