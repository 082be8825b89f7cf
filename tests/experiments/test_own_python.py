import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.experiments.inputs.users_code import Findings, Question
from corral.experiments.inputs.users_process import ask, importing_from
from corral.experiments.own_python import own_python, python_path
from corral.launcher.runners.guard import guarded
from corral.workers.user_code.host import Setup, command
from tests.misleading import WORDS, write_misleading_modules
from tests.test_architecture import FOLDERS, ROOT, modules, name_of

PROGRAMS = [
    "corral.experiments.datasets.formats",
    "corral.launcher.doctor.node",
    "corral.launcher.page",
    "corral.launcher.supervisor",
    "corral.launcher.tracking",
    "corral.launcher.trial.tls_front",
    "corral.workers",
    "corral.workers.data.arithmetic",
    "corral.workers.evaluation",
    "corral.workers.sandbox",
    "corral.workers.user_code",
]


@pytest.fixture(scope="module")
def misleading_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("misleading")
    write_misleading_modules(folder)
    return folder


def said_in(folder: Path, command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


def commands_of_this_interpreter() -> Iterator[tuple[str, str]]:
    """File and following word of each list or tuple of the product that begins with sys.executable."""
    for path in (path for folder in FOLDERS for path in modules(folder)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1:
                first, second = map(ast.unparse, node.elts[:2])
                if first == "sys.executable":
                    yield str(path.relative_to(ROOT)), second


def test_every_process_of_this_interpreter_is_started_through_one_function() -> None:
    others = {file: word for file, word in commands_of_this_interpreter() if word != "'-I'"}
    assert others == {"experiments/own_python.py": "'-P'"}
    templates = "".join(path.read_text() for path in (ROOT / "sbatch_templates").glob("*.j2"))
    assert re.findall(r"\S+ -m corral", templates) == ["-P -m corral"]


def test_every_program_is_tried_that_a_process_of_corral_starts() -> None:
    programs = {
        name_of(path).removesuffix(".__main__")
        for path in (path for folder in FOLDERS for path in modules(folder))
        if '__name__ == "__main__"' in path.read_text() and "plugins" not in path.parts
    }
    of_people = {
        "corral.experiments.recipes.ask_calculator",
        "corral.workers.algorithms.check",
        "corral.workers.master.audit",
    }
    started_by_others = {"corral.launcher.runners.guard", "corral.workers.generation.sglang_entry"}
    assert programs - of_people - started_by_others == set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_imports_from_the_folder_that_it_is_started_in(misleading_folder: Path, program: str) -> None:
    assert WORDS not in said_in(misleading_folder, own_python("-m", program, "--help"))


def test_no_guard_imports_from_the_folder_that_it_is_started_in(misleading_folder: Path) -> None:
    assert said_in(misleading_folder, guarded(own_python("-c", "import queue, tokenizers; print('fine')"))) == "fine\n"


def test_no_process_of_users_code_imports_from_the_folder_that_it_is_started_in(misleading_folder: Path) -> None:
    program = "corral.workers.user_code.agents:agent"  # imports the most
    setup = Setup(program=program, function="nothing:here", name="it", timeout_s=1.0, setting="", channel=0, mark=0)
    assert WORDS not in said_in(misleading_folder, command(setup, sys.path))


def test_an_empty_entry_of_the_search_path_does_not_mean_the_current_folder(
    misleading_folder: Path, tmp_path: Path
) -> None:
    left_empty = f":{tmp_path}:"
    print_path = own_python("-c", "import json, sys; print(json.dumps(sys.path))")
    search_path = python_path({"PYTHONPATH": left_empty})
    assert search_path == {"PYTHONPATH": str(tmp_path)}
    path = json.loads(said_in(misleading_folder, print_path, **search_path))
    assert path[0] == str(tmp_path) and str(misleading_folder) not in path
    assert python_path({}) == {} and python_path({"PYTHONPATH": ":"}) == {"PYTHONPATH": ""}


def test_relative_entries_of_the_search_path_mean_the_same_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert python_path({"PYTHONPATH": "lib:."}, Path("/kept")) == {"PYTHONPATH": f"/kept:{tmp_path}/lib:{tmp_path}"}


def look_at(folder: Path, import_path: str) -> Findings:
    return ask(Question(roots=(folder,), import_paths=(import_path,)))


def test_users_code_is_found_in_the_current_folder_whatever_else_lies_there(
    misleading_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (misleading_folder / "my_reward.py").write_text(
        "import queue, tokenizers\nimport my_helper\n\n\ndef score(**row):\n    return 1.0\n"
    )
    (misleading_folder / "my_helper.py").touch()
    monkeypatch.chdir(misleading_folder)
    findings = look_at(misleading_folder, "my_reward:score")
    assert findings.problems == ()
    assert [file.name for file in findings.files] == ["my_helper.py", "my_reward.py"]


def test_users_code_that_the_environment_hides_is_refused(
    misleading_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(misleading_folder)
    (problem,) = look_at(misleading_folder, "tokenizers:score").problems
    assert f"{misleading_folder}/tokenizers.py is not what Python imports as tokenizers" in problem.message
    assert problem.message.endswith("rename yours")


def test_kept_code_is_imported_before_another_version_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, kept = tmp_path / "elsewhere", tmp_path / "kept"
    for folder in (elsewhere, kept):
        folder.mkdir()
        (folder / "my_reward.py").write_text("def score(**row):\n    return 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    with importing_from(kept):
        findings = look_at(kept, "my_reward:score")
    assert [file.path for file in findings.files] == [kept / "my_reward.py"]
