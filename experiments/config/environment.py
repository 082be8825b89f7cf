"""An environment of a package: its name, its arguments, and the Python that it runs in."""

from pathlib import Path
from typing import Any

from pydantic import Field

from corral.experiments.config.base import FrozenConfig


class EnvironmentConfig(FrozenConfig):
    """An environment of `verifiers` as it is installed, in processes of a Python of its own: docs/environments.md."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/@-]*$")
    """Its taskset, by the name of its package."""
    args: dict[str, Any] = {}
    """Its arguments, as its package names them: {taskset: {num_tasks: 100}}. Agents play by {harness: {id: corral_chat}}, or null where tasks have tools, and {runtime: {type: subprocess}}, where neither this nor the package says otherwise."""  # noqa: E501
    held_out_args: dict[str, Any] | None = None
    """Its arguments beside `args` for the tasks of `evaluation`, whose dataset then has no path: {taskset: {split: test}}."""  # noqa: E501
    num_tasks: int | None = Field(default=None, ge=1)
    """Its first so many tasks; None is all. One that makes them without end needs it. Not of those held out."""
    variables: list[str] = []
    """Names of environment variables that it gets besides; of the others it gets PATH, and what says where certificates and proxies are."""  # noqa: E501
    python: Path | None = None
    """The Python that it is installed in; None is `.venv-environments` beside corral's own environment (`make environments`)."""  # noqa: E501
