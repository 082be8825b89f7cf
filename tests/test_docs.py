"""The documents say what is there: links, paths, commands, settings, states and names are looked up."""

import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from corral.experiments.exit_codes import CommandExit, WorkerExit
from corral.experiments.loading.schema import key_paths
from corral.experiments.loading.validation import OLD_KEYS
from corral.experiments.registry import EXPERIMENTS
from corral.launcher.trial.words import TrialState, WorkerState

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")
_PATH = re.compile(r"[\w.-]+(?:/[\w.*-]+)*/?")
_MODULE = re.compile(r"\bcorral(?:\.\w+)+(?::\w+)?")
_SETTING = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
_METRIC = re.compile(r"(?:rewards|response_length|staleness|ppo|train|data|time|eval)/[\w/]+")
_OPTION = re.compile(r"(?<![\w=-])--?[a-z][a-z-]*")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def prose(document: Path) -> str:
    return _FENCE.sub("", document.read_text())


def code_spans(document: Path) -> list[str]:
    return _CODE_SPAN.findall(prose(document))


def command_lines(document: Path) -> Iterator[str]:
    """What a reader would type, without the remark behind it."""
    lines = code_spans(document)
    for block in _FENCE.findall(document.read_text()):
        lines += block.splitlines()
    for line in lines:
        if re.match(r"(rl-|make )", line):
            yield re.split(r"\s{2,}|\s#", line)[0] if line.startswith("make") else line.partition("  #")[0]


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def table_below(document: Path, heading: str) -> list[list[str]]:
    """Cells of all rows of the tables below a heading."""
    section = document.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    assert section, f"{document.name} has no section {heading!r}"
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


@functools.cache
def help_of(command: str) -> str:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    run = subprocess.run([BIN / command, "--help"], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


@functools.cache
def worker_sources() -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "workers").rglob("*.py")))


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for link in _LINK.findall(prose(document)):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{document.name} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(target), f"{document.name} links to {link}; {target.name} has {anchors(target)}"


@each_document
def test_paths_in_the_repository_exist(document: Path) -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    for span in code_spans(document):
        if not _PATH.fullmatch(span):
            continue
        first, slash, _ = span.partition("/")
        if (slash and first in folders) or span.endswith((".py", ".md")):
            assert any(ROOT.glob(span.rstrip("/"))), f"{document.name} names {span}, which is not there"


@each_document
def test_modules_and_their_names_exist(document: Path) -> None:
    for found in _MODULE.findall(document.read_text()):
        module, _, name = found.partition(":")
        path = ROOT.joinpath(*module.split(".")[1:])
        source = path.with_suffix(".py")
        assert path.is_dir() or source.is_file(), f"{document.name} names {module}, which is not there"
        if name:
            definition = rf"^(async def|def|class) {name}\b"
            is_there = (
                name in dir(import_module(module))
                if path.is_dir()
                else re.search(definition, source.read_text(), re.MULTILINE)
            )
            assert is_there, f"{document.name}: {module} has no {name}"


@each_document
def test_commands_have_the_options_that_are_shown(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    targets |= {name + "=" for name in re.findall(r"\$\(([A-Z_]+)\)", makefile)}
    for line in command_lines(document):
        command, *arguments = line.split()
        if command == "make":
            assert {re.sub("=.*", "=", argument) for argument in arguments} <= targets, (
                f"{document.name} shows `{line}`; the Makefile has {sorted(targets)}"
            )
            continue
        for option in _OPTION.findall(line.removeprefix(command)):
            assert option in _OPTION.findall(help_of(command)), f"{document.name} shows `{line}`: no {option}"


@each_document
def test_settings_exist(document: Path) -> None:
    known = {".".join(map(str, path)) for experiment in EXPERIMENTS.values() for path, _ in key_paths(experiment)}
    sections = {key.partition(".")[0] for key in known if "." in key}
    for span in code_spans(document):
        setting = re.split(r"[=:]", span)[0]
        if _SETTING.fullmatch(setting) and setting.partition(".")[0] in sections:
            assert setting in known or setting in OLD_KEYS, (
                f"{document.name} names the setting {setting}, which is not there"
            )


@each_document
def test_metrics_are_written_under_the_names_that_are_shown(document: Path) -> None:
    for span in code_spans(document):
        if _METRIC.fullmatch(span):
            name = span.removeprefix("eval/")
            assert f'"{name}"' in worker_sources(), f"{document.name} names the metric {span}, which nobody writes"


def test_every_state_of_a_trial_is_explained() -> None:
    states = {*TrialState, *WorkerState} - {WorkerState.NOT_STARTED}
    explained = {word for row in table_below(ROOT / "docs/operations.md", "States") for word in row[0].split(", ")}
    assert states <= explained, f"not explained: {sorted(states - explained)}"


def test_every_exit_code_is_explained() -> None:
    explained = {row[0] for row in table_below(ROOT / "docs/operations.md", "Exit codes")}
    assert {str(code.value) for codes in (CommandExit, WorkerExit) for code in codes} <= explained


def test_what_workers_wait_in_is_named_as_they_name_it() -> None:
    rows = table_below(ROOT / "docs/operations.md", "When something is stuck")
    phases = [phase for row in rows for phase in _CODE_SPAN.findall(row[1])]
    assert len(phases) > 10
    for phase in phases:
        assert f'"{phase}"' in worker_sources(), f"docs/operations.md names the phase {phase!r}, which nobody enters"


def test_every_dependency_is_justified_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + extras["megatron"]
    requirements += [one for tracker in ("tensorboard", "wandb", "mlflow") for one in extras[tracker]]
    installed = {re.split(r"[=<>~\[]", requirement)[0].lower() for requirement in requirements}
    rows = table_below(ROOT / "docs/architecture.md", "Dependencies")
    assert {row[0] for row in rows} - {"package", "---"} == installed
