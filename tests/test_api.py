"""One place to import from: what docs and examples show imports `corral.api` alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import corral.api

ROOT = Path(__file__).parents[1]


def shown_code() -> dict[str, str]:
    """Every piece of Python that users are shown, by where it stands."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    blocks = {
        f"{page.name}, block {number}": block
        for page in pages
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    }
    return blocks | {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "examples").rglob("*.py")}


def modules_imported(code: str) -> set[str]:
    found = re.findall(r"^\s*(?:from|import) (corral[\w.]*)", code, re.MULTILINE)
    return set(found)


def test_docs_and_examples_import_nothing_deeper() -> None:
    imported = {place: modules_imported(code) for place, code in shown_code().items()}
    assert sum(map(bool, imported.values())) >= 5, "the pages show no code any more, or it is not found"
    assert {place: names - {"corral.api"} for place, names in imported.items() if names - {"corral.api"}} == {}


def test_what_type_checkers_see_is_what_there_is() -> None:
    tree = ast.parse(Path(corral.api.__file__).read_text())
    seen = {
        (node.module, alias.name)
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    table = corral.api._NAMES_BY_MODULE
    assert seen == {(module, name) for module, names in table.items() for name in names}
    assert sorted(name for _, name in seen) == dir(corral.api)
    assert all(getattr(corral.api, name) is not None for name in dir(corral.api))


def test_a_reward_an_agent_and_an_experiment_import_no_torch() -> None:
    code = "import sys, corral.api as api; api.Task, api.needs_sandbox, api.PPOConfig, api.Key, api.PPOExperiment"
    said = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert said.stdout.strip() == "False", said.stderr
