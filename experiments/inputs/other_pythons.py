"""The Pythons beside corral's own: which one has SGLang, which one verifiers, and whether it is there.

    a key of the configuration, or .venv-sglang, .venv-environments beside corral's own ──► run once ──► version,
                                                                                           or what to do
They cannot be corral's own: both pin other versions of what it needs.
"""

import subprocess
import sys
from pathlib import Path

from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.config.rollout import SglangConfig
from corral.scheduling.errors import RuleError

_TIMEOUT_S = 60.0  # an interpreter on a cold network file system


def sglang_python(config: SglangConfig) -> Path:
    """The interpreter that servers are started with."""
    return config.python or _beside(".venv-sglang")


def environment_python(config: EnvironmentConfig) -> Path:
    """The interpreter that environments run in."""
    return config.python or _beside(".venv-environments")


def sglang_version(python: Path) -> str:
    """The version of SGLang that an interpreter has.

    Raises:
        ValueError: if there is none, with the way to get one after a semicolon.
    """
    remedy = "`make sglang` installs it; or set sglang.python to a Python that has it"
    return _version(python, "sglang", called="SGLang", remedy=remedy)


def verifiers_version(python: Path) -> str:
    """The same of verifiers."""
    remedy = "`make environments` installs it, or set rollout.environment.python to a Python that has it"
    return _version(python, "verifiers", called="verifiers", remedy=remedy)


def _beside(name: str) -> Path:
    return Path(sys.prefix).parent / name / "bin" / "python"


def _version(python: Path, package: str, *, called: str, remedy: str) -> str:
    ask = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    try:
        done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuleError(f"there is no {called}: {python} cannot be run ({error})", remedy) from error
    if done.returncode:
        raise RuleError(f"there is no {called}: {python} does not have it installed", remedy)
    return done.stdout.strip()
