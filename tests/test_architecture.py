"""Who may import whom, and what stays out: read from the source, and from what a fresh interpreter loads."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("agents", "api", "launcher", "workers", "scheduling", "name_resolve", "experiments")
ALLOWED = {
    "agents": {"workers"},
    "api": {"agents", "experiments", "scheduling", "workers"},
    "scheduling": {"scheduling"},
    "name_resolve": {"name_resolve"},
    "experiments": {"experiments", "scheduling"},
    "launcher": {"launcher", "experiments", "scheduling", "name_resolve", "sbatch_templates"},
    "workers": {"workers", "experiments", "scheduling", "name_resolve"},
}
RANKS: dict[str, list[set[str]]] = {
    # Each room, or module that has none, by floor, from the ground up: a floor imports floors below it only.
    "scheduling": [
        {"errors"},
        {
            "frozen",
            "keys",
            "policy_version",
            "restarts",
            "slurm_formats",
            "staleness",
            "worker_information",
        },
        {"parallel"},
        {"cadence", "packing"},
        {"memory", "redistribution", "scheduling"},
        {"allocation", "model_function_call", "placement"},
        {"dataflow"},
        {"step_plan"},
    ],
    "launcher": [
        {"files", "layout", "terminal", "trial"},
        {"runners"},
        {"slurm"},
        {"extra_jobs"},
        {"doctor", "evaluation", "logs", "samples", "status", "submit", "supervisor", "timeline", "tracking"},
        {"follow", "page"},
        {"commands"},
    ],
    "workers": [
        {"data", "modules", "sandbox", "streams"},
        {"agents", "checkpoint", "episodes", "rewards", "shared_prompts"},
        {
            "backends",
            "delivery",
            "engine",
            "environments",
            "lifecycle",
            "model_endpoint",
            "requests",
            "user_code",
            "weight_transport",
        },
        {"algorithms", "generation", "rollout"},
        {"evaluation", "manager"},
        {"master", "model"},
        {"__main__"},
    ],
    "experiments": [
        {"config", "exit_codes", "own_python"},
        {"errors", "worker_specs"},
        {"regular_file"},
        {"prompts"},
        {"datasets"},
        {"trial"},
        {"inputs"},
        {"checks", "host_memory"},
        {"loading"},
        {"experiment", "recipes"},
        {"policy", "row_experiment", "specs"},
        {"plan", "async_ppo", "ppo"},
        {"problems"},
        {"registry"},
    ],
}
LARGEST_ROOM = 0.2
SLURM_PROGRAMS = {"sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun", "sstat", "sattach"}
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
WORKERS_WITHOUT_MODELS = (
    "corral.workers.__main__",
    "corral.workers.master.master_worker",
    "corral.workers.manager.gserver_manager",
    "corral.workers.rollout.rollout_worker",
)
DANGEROUS_CALLS = {"recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list", "scatter_object_list"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """corral.launcher.commands.stop"""
    return "corral." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
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


def room_of(path: Path) -> str:
    """The first name below the folder: a room, or a module that has none."""
    return Path(path.relative_to(ROOT).parts[1]).stem


@pytest.mark.parametrize("folder", RANKS)
def test_rooms_import_rooms_of_lower_floors_only(folder: str) -> None:
    floor_by_room = {room: floor for floor, rooms in enumerate(RANKS[folder]) for room in rooms}
    for path in modules(folder):
        if path.parent == ROOT / folder and path.stem == "__init__":
            continue
        room = room_of(path)
        assert room in floor_by_room, f"{path.relative_to(ROOT)} has no floor in RANKS"
        for name in imported_names(path):
            target = name.split(".")[2] if name.startswith(f"corral.{folder}.") else room
            assert target == room or floor_by_room[target] < floor_by_room[room], (
                f"{path.relative_to(ROOT)} imports {name}: {room} is on floor {floor_by_room[room]} and {target} on "
                f"floor {floor_by_room[target]}"
            )


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {name_of(path): path for folder in FOLDERS for path in modules(folder) if path.stem != "__init__"}
    graph = {name: imported_names(path) & (paths.keys() - {name}) for name, path in paths.items()}
    list(TopologicalSorter(graph).static_order())  # CycleError names the circle


@pytest.mark.parametrize("folder", ("launcher", "workers"))
def test_no_room_is_a_house_of_its_own(folder: str) -> None:
    lines = Counter[str]()
    for path in modules(folder):  # a room within a room counts by itself, as one can read it by itself
        lines["/".join(path.relative_to(ROOT).parts[1:-1]) or room_of(path)] += len(path.read_text().splitlines())
    room, count = lines.most_common(1)[0]
    assert count < LARGEST_ROOM * lines.total(), f"{room} holds {count} of the {lines.total()} lines of {folder}"


def test_only_the_room_of_slurm_composes_its_command_lines() -> None:
    for path in (path for folder in FOLDERS for path in modules(folder) if room_of(path) != "slurm"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Constant):
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert node.elts[0].value not in SLURM_PROGRAMS, f"{where} composes a call of {node.elts[0].value}"


def test_every_place_that_starts_code_of_a_user_is_known_and_hides_the_secrets() -> None:
    """A place that is new here says in this table what hides a trial's secrets from what it starts."""
    starters = {
        "RewardJudge",
        "Children",
        "HiddenSecrets",
        "hide_secrets",
        "asyncio.create_subprocess_exec",
        "subprocess.Popen",
    }
    starters |= {"subprocess.run", "os.fork", "os.posix_spawn", "asyncio.create_subprocess_shell", "os.system"}
    found = Counter(
        (str(path.relative_to(ROOT / "workers")), name.rpartition(".")[2])
        for path in (ROOT / "workers").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for name in map(ast.unparse, (node.func, *node.args[:1]))
        if name in starters
    )
    assert found == {
        ("agents/shipped.py", "run"): 1,  # bwrap alone
        ("agents/shipped.py", "create_subprocess_exec"): 1,  # in an agent's process, where the secrets are hidden
        ("evaluation.py", "RewardJudge"): 1,
        ("generation/sglang_process.py", "Popen"): 1,  # SGLang is no user's code
        ("master/dealt_prompts.py", "Children"): 1,
        ("model/generator.py", "RewardJudge"): 1,
        ("rollout/episode_player.py", "Children"): 1,
        ("rollout/judging.py", "Children"): 1,
        ("rollout/rollout_worker.py", "RewardJudge"): 1,
        ("sandbox/hidden_secrets.py", "HiddenSecrets"): 2,  # nothing hidden, and folders
        ("sandbox/hidden_secrets.py", "run"): 1,  # bwrap alone
        ("sandbox/bubblewrap.py", "create_subprocess_exec"): 1,
        ("user_code/children.py", "create_subprocess_exec"): 1,  # all code of a user
        ("user_code/children.py", "hide_secrets"): 1,
        ("user_code/host.py", "fork"): 1,
    }


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
    return [name_of(path) for path in modules(folder) if path.stem not in ("__init__", "__main__")]


def test_the_half_without_models_and_workers_that_have_none_never_load_torch() -> None:
    folders = ("scheduling", "name_resolve", "experiments", "launcher")
    names = [*WORKERS_WITHOUT_MODELS, *(name for folder in folders for name in module_names(folder))]
    assert not loaded_by(names) & {"torch", "transformers"}


def test_keepers_and_who_looks_load_no_schema() -> None:
    names = ["corral.launcher.supervisor.__main__", "corral.launcher.status.reader", "corral.launcher.commands.stop"]
    assert "pydantic" not in loaded_by(names)


def test_who_tries_a_loss_loads_no_engine() -> None:
    assert not loaded_by(["corral.workers.algorithms.call_trial"]) & {"transformers", "sympy"}  # the latter for DTensor


def test_what_agents_are_written_with_is_installed_and_light(tmp_path: Path) -> None:
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import corral.agents\nfrom corral.agents import Outcome, Session\n"
        "print(corral.agents.__file__, *(name.split('.')[0] for name in sys.modules), sep='\\n')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    file, *loaded = run.stdout.split()
    assert Path(file).is_relative_to(tmp_path)
    assert not set(loaded) & {"torch", "transformers", "numpy", "aiohttp", "zmq", "redis", "cryptography"}
