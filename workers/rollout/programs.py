"""What plays episodes in processes of its own: an agent of the user's, or an environment of a package.

    Program.prepare(channel, mark) ──► Started: command, what the process sees ──it has ended──► Started.end()

`corral.workers.rollout.agent_processes` starts, watches and asks them, and knows no difference.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.config.rollout import RolloutConfig
from corral.experiments.inputs.environment_tasks import LOAD_TIMEOUT_S, host_command, host_settings
from corral.experiments.inputs.other_pythons import environment_python
from corral.experiments.worker_specs import EnvironmentSpec
from corral.workers.environments.confinement import Confinement
from corral.workers.sandbox.curtain import Curtain, draw_curtain
from corral.workers.user_code.agent_host import Setup, command

logger = logging.getLogger(__name__)

_IMPORT_TIMEOUT_S = 120.0
NOBODY = 0
"""In place of the parent's number: behind a curtain a process has another one, with which it ends."""
_BEAT_S = 1.0  # of an environment's host


@dataclass(frozen=True, slots=True)
class Started:
    """One process of a program, about to be started."""

    command: Sequence[str]
    curtain: Curtain
    """Keeps it from a trial's secrets."""
    environment: Mapping[str, str] | None = None
    """None: the worker's own."""
    folder: Path | None = None
    """Where it works; None: where the worker does."""
    end: Callable[[], object] = lambda: None
    """Removes what it leaves, once it has ended."""


class Program(Protocol):
    """What plays."""

    name: str
    """For people: "agent my:solve"."""
    start_timeout_s: float
    """How long a process may take to say that it is ready."""
    beat_s: float
    """Pause between two beats of it."""

    def prepare(self, channel: int, mark: int) -> Started:
        """The next process; the descriptors are inherited under their numbers."""

    def greet(self, ready: Any) -> bool:
        """Look at what a process says of itself when it is ready; False if it is to be prepared in another way."""


class AgentProgram:
    """An agent of the user's own, in this Python."""

    start_timeout_s = _IMPORT_TIMEOUT_S

    def __init__(
        self,
        agent: str,
        *,
        settings: Mapping[str, Any],
        model: Path,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        timeout_s: float,
        curtain: Curtain,
        max_tokens: int | None = None,
    ) -> None:
        """
        Args:
            max_tokens: `rollout.episode.max_tokens`.
            model: folder with the tokenizer.
            template_arguments: `dataset.chat_template_kwargs`.
            timeout_s: `rollout.agent_timeout_s`.
        """
        self._curtain = curtain
        self.name = f"agent {agent}"
        arguments = dict(template_arguments)
        self._setup = Setup(agent, dict(settings), str(model), timeout_s, os.getpid(), -1, -1, arguments, max_tokens)
        self.beat_s = self._setup.beat_s

    def prepare(self, channel: int, mark: int) -> Started:
        parent = NOBODY if self._curtain.hidden else self._setup.parent
        started = msgspec.structs.replace(self._setup, parent=parent, channel=channel, mark=mark)
        return Started(command(started, sys.path), self._curtain)

    def greet(self, ready: Any) -> bool:
        if not (ready["needs_sandbox"] and self._curtain.hidden):
            return True
        self._curtain = draw_curtain(())  # behind one there are no sandboxes
        return False


class EnvironmentProgram:
    """An environment of a package, in the Python that it is installed in, without what the worker knows."""

    beat_s = _BEAT_S

    def __init__(
        self,
        config: EnvironmentConfig,
        rollout: RolloutConfig,
        *,
        planned: EnvironmentSpec | None,
        curtain: Curtain,
    ) -> None:
        """
        Args:
            rollout: whose deadline its episodes have.
            planned: what it was at submission.
        """
        self.name, self.start_timeout_s = f"environment {config.id}", LOAD_TIMEOUT_S
        self._config, self._planned, self._python = config, planned, environment_python(config)
        self._settings = host_settings(config) | {
            "timeout_s": rollout.agent_timeout_s,
            "parent": NOBODY if curtain.hidden else os.getpid(),
        }
        self._curtain = curtain
        self._is_told = False

    def prepare(self, channel: int, mark: int) -> Started:
        confinement = Confinement(self._python, variables=self._config.variables)
        command = host_command(self._python, "play", self._settings, f"{channel},{mark}")
        return Started(command, self._curtain, confinement.environment, confinement.folder, confinement.end)

    def greet(self, ready: Any) -> bool:
        planned, self._is_told = None if self._is_told else self._planned, True
        if planned is None or (ready["sha256"] == planned.sha256 and ready["packages"] == planned.packages):
            return True
        logger.warning(
            "%s is not what it was at submission: %s then, %s now", self.name, planned.packages, ready["packages"]
        )
        return True
