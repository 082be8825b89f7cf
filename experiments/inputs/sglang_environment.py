"""The Python that has SGLang: which one it is, and whether SGLang is there.

sglang.python, or .venv-sglang beside corral's own environment ──► run once ──► version, or what to do

It cannot be corral's own: SGLang pins other versions of torch and transformers.
"""

import subprocess
import sys
from pathlib import Path

from corral.experiments.config.rollout import SglangConfig

_TIMEOUT_S = 60.0  # an interpreter on a cold network file system
_ASK = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
_REMEDY = "`make sglang` installs it; or set sglang.python to a Python that has it"


def sglang_python(config: SglangConfig) -> Path:
    """The interpreter that servers are started with."""
    return config.python or Path(sys.prefix).parent / ".venv-sglang" / "bin" / "python"


def sglang_version(python: Path) -> str:
    """The version of SGLang that an interpreter has.

    Raises:
        ValueError: if there is none, with the way to get one after a semicolon.
    """
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"there is no SGLang: {python} cannot be run ({error}); {_REMEDY}") from error
    if done.returncode:
        raise ValueError(f"there is no SGLang: {python} does not have it installed; {_REMEDY}")
    return done.stdout.strip()
