"""One place to import from: what docs and examples show imports `corral.api` alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_each_name_is_found_and_no_other_one() -> None:
    assert {"Key", "PPOConfig", "Session", "Task", "TokenLosses", "tools"} <= set(dir(corral.api))
    assert all(getattr(corral.api, name).__name__ for name in dir(corral.api))
    with pytest.raises(AttributeError, match="corral.api has no 'Keys'; it has AdvantageBatch, "):
        corral.api.Keys  # noqa: B018


def test_a_reward_an_agent_and_an_experiment_import_no_torch() -> None:
    code = "import sys, corral.api as api; api.Task, api.needs_sandbox, api.PPOConfig, api.Key, api.PPOExperiment"
    said = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert said.stdout.strip() == "False", said.stderr
