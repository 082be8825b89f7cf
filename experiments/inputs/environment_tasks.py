"""The tasks of an environment, listed at submission by its host program in the Python that it is installed in.

    EnvironmentConfig ──► host.py list ──► what it is, a row a task ──► FoundEnvironment ──► tasks.jsonl of the trial

From then on tasks are rows as those of any dataset: their order, and which of them a commit covers, follow from their
ids.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.inputs.other_pythons import environment_python, verifiers_version

_HOST = Path(__file__).parents[2] / "workers" / "environments" / "host.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEnvironment:
    """What an environment has said of itself."""

    rows: bytes
    """JSON lines: id, prompt to be shown, task; none where it was not asked for them."""
    packages: Mapping[str, str]
    """Versions of what it is made of, by name."""
    sha256: str
    """Digest of its own source."""


def host_command(python: Path, mode: str, settings: Mapping[str, Any], where: str) -> list[str]:
    """Starts the host of an environment, as `corral/workers/environments/host.py` says."""
    return [str(python), str(_HOST), mode, json.dumps(settings), where]


def host_settings(config: EnvironmentConfig, *, held_out: bool = False) -> dict[str, Any]:
    """What a host has to know of the configuration.

    Args:
        held_out: whether it is about the tasks of `evaluation`.
    """
    return {
        "id": config.id,
        "args": merged(config.args, config.held_out_args or {}) if held_out else config.args,
        "num_tasks": None if held_out else config.num_tasks,
    }


def find_environment(config: EnvironmentConfig, *, lists: bool, held_out: bool = False) -> FoundEnvironment:
    """What it is, and its tasks, as it makes them now.

    Args:
        lists: whether tasks are asked for.
        held_out: whether those of `evaluation` are.

    Raises:
        ValueError: if it cannot be loaded, with the way out after a semicolon.
    """
    python = environment_python(config)
    verifiers_version(python)
    with tempfile.TemporaryDirectory(prefix="corral-environment-") as folder:
        output, settings = Path(folder) / "tasks.jsonl", host_settings(config, held_out=held_out)
        command = host_command(python, "list" if lists else "describe", settings, str(output))
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=config.load_timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(
                f"environment {config.id} has not listed its tasks within {config.load_timeout_s:g} s; "
                "raise rollout.environment.load_timeout_s, or ask for fewer tasks"
            ) from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise ValueError(
                f"environment {config.id} cannot be loaded by {python}: {said[-1]}; mend rollout.environment, or "
                f"install it there: {python} -m pip install ..."
            )
        first, _, rows = output.read_bytes().partition(b"\n")
    described = json.loads(first)["described"]
    return FoundEnvironment(rows=rows, packages=described["packages"], sha256=described["sha256"])


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, mapping by mapping."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both
