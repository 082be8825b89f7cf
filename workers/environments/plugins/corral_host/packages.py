"""An environment of a package: how it is configured, what it is, which tasks it has."""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils import loaders

MAX_ERROR = 2000  # characters


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of the environment."""

    id: str
    args: Mapping[str, Any]
    lists: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`args` and `num_tasks` of each set of tasks that is asked for, by its name."""
    timeout_s: float = 300.0
    """How long an episode may be at work of its own at a time."""
    parent: int = 0
    """The worker's process."""


def make_config(name: str, args: Mapping[str, Any]) -> vf.EnvConfig:
    """Its configuration: what the user says, over what its authors say, over a conversation on this machine.

    verifiers' own defaults are a shell for the model, and a sandbox that is rented; neither is meant by who names none.
    """
    given = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
    declared = loaders.env_config_type(name, str(given.get("id", "")))
    brings_harness = loaders.default_harness_id(name) == name
    talks = "null" if _has_tools(name, given["taskset"]) else "corral_chat"
    for agent, known in declared.model_fields.items():
        if isinstance(known.default, vf.AgentConfig):
            role = dict(given.get(agent) or {})
            if known.default.harness is None and not brings_harness:
                role.setdefault("harness", {"id": talks})
            if "runtime" not in known.default.model_fields_set:
                role.setdefault("runtime", {"type": "subprocess"})
            given[agent] = role
    return loaders.resolve_env_config(given)


def _has_tools(name: str, given: Mapping[str, Any]) -> bool:
    taskset = loaders.taskset_class(name)
    config = loaders.taskset_config_type(name).model_validate(given)
    return bool(taskset.toolsets(config) or taskset.task_type().toolsets(config.task))


def describe(config: vf.EnvConfig) -> dict[str, Any]:
    """By what one sees later that the code of an environment is another: its packages' versions, and its files."""
    distributions = metadata.packages_distributions()
    digest, packages = hashlib.sha256(), {"verifiers": metadata.version("verifiers")}
    for module in _modules(config):
        for name in distributions.get(module.__name__.partition(".")[0], ()):
            packages[name] = metadata.version(name)
        file = Path(str(module.__file__))
        files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
        for path in files:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return {"packages": packages, "sha256": digest.hexdigest()}


def _modules(config: vf.EnvConfig) -> Iterator[Any]:
    yield loaders.import_taskset(config.taskset.id)
    if config.id:
        yield loaders.import_environment(config.id)


def rows_of(taskset: vf.Taskset, *, num_tasks: int | None) -> Iterator[dict[str, Any]]:
    """A row for each task, with all that the task is made of.

    Raises:
        ValueError: if there are no tasks, or no end of them, or two of the same name.
    """
    if num_tasks is None and not taskset.bounded:
        raise ValueError("it makes tasks without end; say how many with rollout.environment.num_tasks")
    tasks = list(itertools.islice(taskset, num_tasks))
    if not tasks:
        raise ValueError("it has no tasks")
    ids = [task.data.id or "" for task in tasks]
    if not all(ids) or len(set(ids)) < len(ids):
        ids = [task.key for task in tasks]
    for name, task in zip(ids, tasks, strict=True):
        shown = task.data.prompt_text or task.data.name or task.data.description or name
        yield {"id": name, "prompt": shown, "task": task.data.model_dump(mode="json", exclude_defaults=True)}


def one_line(error: Exception) -> str:
    """An error on one line."""
    words = re.sub(r"For further information visit \S+", "", str(error)).split()
    return f"{type(error).__name__}: {' '.join(words)}"[:MAX_ERROR]
