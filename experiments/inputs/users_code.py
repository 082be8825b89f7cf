"""What rl-submit asks about a user's own code, and what the process that imports it answers: two files of JSON.

launcher/user_code ── Question ──► python -m corral.workers.user_code ── Findings ──► ConfigError, or files to keep
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.base import FrozenConfig
from corral.scheduling.keys import Key


class Question(FrozenConfig):
    """What to import, and what to try."""

    roots: tuple[Path, ...]
    """Folders that modules are looked for in, before those of the environment."""
    import_paths: tuple[str, ...]
    """Everything that the plan names, each once."""
    import_timeout_s: float = Field(gt=0.0)
    """Deadline of all imports together."""
    reward: str | None = None
    """The function that is tried on `problem`; None tries none."""
    reward_timeout_s: float = Field(default=15.0, gt=0.0)
    problem: dict[str, Any] = {}
    """One row of the dataset, as it stands in the file."""
    answers: tuple[str, ...] = ()
    """Texts that the reward is tried on; one that it can judge is enough."""
    agent: str | None = None
    """The function that has to be a coroutine function of an agent's form; None looks at none."""
    train: "TrainQuestion | None" = None
    """A train step of the actor with a loss or an advantage of the user's own; None tries none."""


class TrainQuestion(FrozenConfig):
    """One train step of the actor on two prompts with two answers each."""

    ppo: PPOConfig
    keys: tuple[str, ...]
    """What the graph gives the step, by the interface's names."""
    declared: tuple[Key, ...]
    """Keys of the graph that are not built in."""


class Problem(FrozenConfig):
    """One thing that is wrong with a user's code."""

    import_path: str
    message: str
    """With the file and the line, where there is one."""
    kind: Literal["missing_module", "code"] = "code"
    """`missing_module`: a module that the environment of this process does not have."""


class UsedFile(FrozenConfig):
    """A file of the user's own that the process has loaded."""

    name: str
    """Below its import root, with slashes."""
    path: Path
    size_bytes: int


class Findings(FrozenConfig):
    """What became of it."""

    problems: tuple[Problem, ...] = ()
    files: tuple[UsedFile, ...] = ()
    """Modules, those beside them in their packages, and what was read while they ran."""
    not_kept: tuple[str, ...] = ()
    """Paths of files that were read, and are too large to be kept."""
    packages: dict[str, str] = {}
    """Versions of the installed packages that the modules loaded, by name."""


def is_users(import_path: str) -> bool:
    """Whether an import path names code that is not corral's."""
    return ":" in import_path and import_path.partition(".")[0] != "corral"


def users_paths(import_paths: Sequence[str]) -> tuple[str, ...]:
    """Those of the user's own, each once."""
    return tuple(dict.fromkeys(path for path in import_paths if is_users(path)))
