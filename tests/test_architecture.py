"""Who may import whom, and what stays out: read from the source, and from what a fresh interpreter loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("launcher", "workers", "scheduling", "name_resolve", "experiments")
ALLOWED = {
    "scheduling": {"scheduling"},
    "name_resolve": {"name_resolve"},
    "experiments": {"experiments", "scheduling"},
    "launcher": {"launcher", "experiments", "scheduling", "name_resolve", "sbatch_templates"},
    "workers": {"workers", "experiments", "scheduling", "name_resolve"},
}
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
DANGEROUS_CALLS = {"recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list", "scatter_object_list"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_down_only(folder: str) -> None:
    for path in modules(folder):
        for name in imported_names(path):
            if name.startswith("corral."):
                target = name.split(".")[1]
                assert target in ALLOWED[folder], f"{path.relative_to(ROOT)} imports {name}; {folder} may not"


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_pickled(folder: str) -> None:
    for path in modules(folder):
        for name in imported_names(path):
            assert name.split(".")[0] not in PICKLES, f"{path.relative_to(ROOT)} imports {name}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in DANGEROUS_CALLS, f"{path.relative_to(ROOT)}:{node.lineno} uses {node.attr}"
            if isinstance(node, ast.keyword) and node.arg == "shell":
                raise AssertionError(f"{path.relative_to(ROOT)} runs a shell string")
            if isinstance(node, ast.keyword) and node.arg == "weights_only":
                assert isinstance(node.value, ast.Constant) and node.value.value is True, f"{path.relative_to(ROOT)}"


def loaded_by(modules_to_import: list[str]) -> set[str]:
    code = f"import sys\nfor name in {modules_to_import!r}: __import__(name)\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return {name.split(".")[0] for name in run.stdout.split()}


def module_names(folder: str) -> list[str]:
    return [
        "corral." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in modules(folder)
        if path.stem not in ("__init__", "__main__")
    ]


def test_the_half_without_models_never_loads_torch() -> None:
    names = [
        name for folder in ("scheduling", "name_resolve", "experiments", "launcher") for name in module_names(folder)
    ]
    assert not loaded_by(names) & {"torch", "transformers"}


@pytest.mark.parametrize(
    "module",
    [
        "corral.workers.__main__",
        "corral.workers.master.master_worker",
        "corral.workers.manager.gserver_manager",
        "corral.workers.rollout.rollout_worker",
    ],
)
def test_control_workers_never_load_torch(module: str) -> None:
    assert not loaded_by([module]) & {"torch", "transformers"}
