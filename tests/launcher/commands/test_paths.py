"""Whatever path a user names, each command answers with its work or with a message: never with a traceback."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import pytest

from corral.experiments.errors import ConfigError
from corral.experiments.worker_specs import ParameterCounts
from corral.launcher.commands.common import run
from corral.launcher.commands.status import status
from corral.launcher.commands.view import view
from corral.launcher.submit import prepare
from tests.launcher.page.page_trials import add_timeline, write_trial

TRIAL = "small-grpo/t"
# {path} stands for the path that is tried.
USES = (
    "submit {path} --local --dry-run=plan",
    "submit ppo.yaml --local --dry-run=plan --fileroot {path}",
    "submit ppo.yaml --local --dry-run=plan --profile {path}",
    "submit ppo.yaml --local --dry-run=plan -s dataset.path={path}",
    "submit ppo.yaml --local --dry-run=plan -s actor.path={path}",
    "submit --resume {path} --dry-run=plan",
    "submit --resume t --dry-run=plan --fileroot {path}",
    "status {path}",
    "status --fileroot {path}",
    "status t --check --fileroot {path}",
    "stop {path}",
    "stop t --fileroot {path}",
    "logs {path}",
    "logs t --bundle {path}",
    "logs t --errors --fileroot {path}",
    "doctor --quick --fileroot {path}",
    "eval {path} --show",
    "eval t --show --dataset {path}",
    "eval t --dataset {path} --local",
    "samples {path}",
    "samples t --fileroot {path}",
    "trace {path}",
    "trace t -o {path}",
    "track {path}",
    "track t --to {path}",
    "view {path} -o page.html",
    "view t -o {path}",
    "view -o page.html --fileroot {path}",
)
OUTPUTS = tuple(use for use in USES if use.startswith(("logs t --bundle", "trace t -o", "view t -o")))


def _folder(root: Path) -> str:
    (root / "folder").mkdir()
    return str(root / "folder")


def _pipe(root: Path) -> str:
    os.mkfifo(root / "pipe")
    return str(root / "pipe")


def _loop(root: Path) -> str:
    (root / "loop").symlink_to("loop")
    return str(root / "loop")


PATHS: Mapping[str, Callable[[Path], str]] = {
    "a folder": _folder,
    "below a folder that is missing": lambda root: str(root / "missing" / "x"),
    "below a file": lambda root: str(root / "ppo.yaml" / "x"),
    "a file system that takes no files": lambda root: "/proc/x",
    "nothing": lambda root: "",
    "a name with a new line": lambda root: str(root / "a\nb" / "c"),
    "a name with a zero byte": lambda root: str(root / "a\0b"),
    "a name that is no UTF-8": lambda root: str(root / "a\udcff" / "c"),
    "a name that is too long": lambda root: str(root / ("a" * 300)),
    "half a surrogate": lambda root: str(root / "a\ud800"),
    "a pipe": _pipe,
    "a device": lambda root: "/dev/full",
    "a link to itself": _loop,
    "the home of nobody": lambda root: "~nobody-of-this-name/x",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment and an ended trial `t`, and the current one."""
    directory = write_trial(tmp_path, "t", steps=3)
    add_timeline(directory, steps=3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORRAL_FILEROOT", str(tmp_path / "trials"))
    return tmp_path


PAIRS = [(kind, use) for kind in PATHS for use in USES]
QUICK = {*PAIRS[:: len(PATHS) + 1], *((kind, use) for kind in PATHS for use in OUTPUTS)}


@pytest.mark.parametrize(
    ("kind", "use"), [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in PAIRS]
)
def test_a_path_of_any_kind_is_no_reason_for_a_traceback(
    kind: str, use: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = use.split()
    path = PATHS[kind](root)
    command = getattr(import_module(f"corral.launcher.commands.{name}"), {"eval": "evaluate"}.get(name, name))
    with pytest.raises(SystemExit) as ended:
        run(command, [argument.replace("{path}", path) for argument in arguments])
    out, told = capfd.readouterr()
    assert ended.value.code in (0, 2, 3, 4), told
    if ended.value.code and not (name == "doctor" and "fail " in out):
        assert told.startswith("error: ") and "Errno" not in told, told
    if use in OUTPUTS:
        assert ended.value.code == 2, told


def test_an_output_that_cannot_be_written_leaves_a_device_as_it_was_and_names_the_folder_that_is_missing(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(view, ["t", "-o", "/dev/null"])
    assert Path("/dev/null").is_char_device()
    with pytest.raises(SystemExit):
        run(view, ["t", "-o", "missing/x.html"])
    told = capfd.readouterr().err
    assert "-o missing/x.html cannot be written: there is no folder missing" in told and "hint: name a file" in told


def test_a_home_that_is_unknown_and_a_variable_that_is_not_set_are_told(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (["--fileroot", ""], "an argument is empty"),
        (["--fileroot="], "--fileroot is empty"),
        (["a\udcff"], "no UTF-8 text"),
        (["~nobody-of-this-name/x"], "is no trial directory"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(status, arguments)
        assert ended.value.code in (2, 3) and words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("shell", "code", "words"),
    [
        ("rl-status -a | head -0; exit ${PIPESTATUS[0]}", 0, ""),
        ("rl-status -a > /dev/full", 1, "the output cannot be written: No space left on device"),
        ("rl-status -a >&-", 0, ""),
        ("mkdir gone; cd gone; rmdir ../gone; rl-status ./t", 2, "the current folder is not there any more"),
    ],
)
def test_an_output_that_nobody_can_read_is_no_traceback(root: Path, shell: str, code: int, words: str) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, words in ended.stderr) == (code, True), ended.stderr
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr


def test_an_interrupt_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run(interrupted, [])
    assert ended.value.code == 130 and "Traceback" not in capfd.readouterr().err


def test_a_file_system_without_room_is_refused_and_too_little_of_it_is_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="its file system has no room"):
        prepare.prepare(root / "ppo.yaml", ["cluster.fileroot=/proc/x"], trial_name=None, mode="local")
    overrides = [f"cluster.fileroot={root / 'trials'}"]
    monkeypatch.setattr(prepare, "count_parameters", lambda model, head: ParameterCounts(trained=10**15, frozen=0))
    warnings = prepare.prepare(root / "ppo.yaml", overrides, trial_name=None, mode="local").warnings
    assert any(one.startswith("checkpoints need about 3.6e+07 GB") for one in warnings), warnings


@pytest.mark.parametrize(("key", "value"), [("cpu", "100000"), ("mem", "900T")])
def test_a_worker_that_asks_for_more_than_this_machine_has_is_refused_by_number(
    key: str, value: str, root: Path
) -> None:
    overrides = [f"cluster.fileroot={root / 'trials'}", f"groups.model_worker.scheduling.{key}={value}"]
    with pytest.raises(ConfigError, match="a model_worker asks for .*, and this machine has"):
        prepare.prepare(root / "ppo.yaml", overrides, trial_name=None, mode="local")
