"""The tasks of an environment, listed at submission by its host program in the Python that it is installed in.

    EnvironmentConfig ──► corral_host tell ──► what it is, a row a task ──► FoundEnvironment ──► the trial's tasks.jsonl

From then on tasks are rows as those of any dataset: their order, and which of them a commit covers, follow from their
ids.
"""

import json
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.experiments.config.base import merged
from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.inputs.other_pythons import environment_python, verifiers_version
from corral.experiments.trial.leftovers import temporary_folder
from corral.scheduling.errors import RuleError

_PLUGINS = Path(__file__).parents[2] / "workers" / "environments" / "plugins"
_START = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module('corral_host', None, '__main__', True)"
HELD_OUT = "evaluation.dataset"
LOAD_TIMEOUT_S = 300.0
"""How long an environment may take to be loaded, and at submission to list its tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEnvironment:
    """An environment as its host describes it."""

    rows: Mapping[str, bytes]
    """JSON lines of id, prompt to be shown, task; by the key of the dataset for which they were asked."""
    packages: Mapping[str, str]
    """Versions of what it is made of, by name."""
    sha256: str
    """Digest of its own source."""


def host_command(python: Path, mode: str, settings: Mapping[str, Any], where: str) -> list[str]:
    """Starts the host of an environment, as `plugins/corral_host/__main__.py` says."""
    return [str(python), "-P", "-c", _START, str(_PLUGINS), mode, json.dumps(settings), where]


def host_settings(config: EnvironmentConfig) -> dict[str, Any]:
    """The part of the configuration that a host needs."""
    return {"id": config.id, "args": config.args}


def find_environment(config: EnvironmentConfig, *, lists: Collection[str] = ()) -> FoundEnvironment:
    """What it is, and its tasks, as it makes them now; by one start of it, which takes seconds.

    Args:
        lists: keys of the datasets whose tasks are asked for: `dataset`, HELD_OUT.

    Raises:
        ValueError: if it cannot be loaded, with the way out after a semicolon.
    """
    held_out = {"args": merged(config.args, config.held_out_args or {}), "num_tasks": None}
    asked = {"dataset": {"args": config.args, "num_tasks": config.num_tasks}, HELD_OUT: held_out}
    settings = host_settings(config) | {"lists": {key: asked[key] for key in lists}}
    with temporary_folder("corral-environment-") as folder:
        _run(config, settings, folder)
        described = json.loads((folder / "described.json").read_bytes())
        rows = {key: (folder / f"{key}.jsonl").read_bytes() for key in lists}
    return FoundEnvironment(rows=rows, packages=described["packages"], sha256=described["sha256"])


def _run(config: EnvironmentConfig, settings: Mapping[str, Any], folder: Path) -> None:
    """Has the host tell; ValueError if it cannot."""
    python = environment_python(config)
    try:
        done = subprocess.run(
            host_command(python, "tell", settings, str(folder)),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuleError(
            f"environment {config.id} has not listed its tasks within {LOAD_TIMEOUT_S:g} s",
            "ask for fewer tasks by rollout.environment.num_tasks",
        ) from error
    except OSError:
        verifiers_version(python)  # which says it better
        raise
    if done.returncode:
        verifiers_version(python)
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {done.returncode}"]
        raise RuleError(
            f"environment {config.id} cannot be loaded by {python}: {lines[-1]}",
            f"mend rollout.environment, or install it there: {python} -m pip install ...",
        )
