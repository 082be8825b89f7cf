"""Questions of rl-submit about a user's own code, and the answers of the process that imports it: two files of JSON.

users_process ── Question ──► python -m corral.workers.user_code ── Findings ──► ConfigError, keys, or files to keep
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from corral.experiments.config.algorithm import DPOConfig, PPOConfig
from corral.experiments.config.base import FrozenConfig
from corral.experiments.config.rollout import EXACT_MATCH, NO_REWARD, SINGLE_TURN, RewardPart
from corral.experiments.worker_specs import Head
from corral.scheduling.keys import Key
from corral.scheduling.model_function_call import CallType, ModelFunctionCall

SHIPPED = (EXACT_MATCH, NO_REWARD, SINGLE_TURN)
"""Import paths of what experiments name of corral's own: there is nothing to look at."""


class Question(FrozenConfig):
    """The names to import, and the calls to try."""

    roots: tuple[Path, ...]
    """Folders that modules are looked for in, before those of the environment."""
    import_paths: tuple[str, ...]
    """Everything that the plan names, each once."""
    import_timeout_s: float = Field(default=120.0, gt=0.0)  # torch from a cold file server takes a good part of it
    """Deadline of all imports together."""
    interfaces: tuple[str, ...] | None = None
    """Those of them that make an interface; None asks none of the paths which keys it reads and makes."""
    ppo: PPOConfig | None = None
    """What interfaces are made with."""
    rewards: dict[str, RewardPart] = {}
    """The parts of the reward, by name, that are tried on each of `rows`."""
    reward_timeout_s: float = Field(default=15.0, gt=0.0)
    rows: "tuple[TriedRow, ...]" = ()
    correct: float | str | None = None
    """`evaluation.correct`; None where nothing is held out."""
    agent: str | None = None
    """The function that has to be a coroutine function of an agent's form; None looks at none."""
    agent_settings: dict[str, Any] = {}
    """What it is called with besides."""
    sampler: str | None = None
    """The function that is tried on a few histories of rows; None tries none."""
    tries_sandbox: bool = False
    """Whether a sandbox is made here where a reward or an agent needs one."""
    calls: "tuple[CallQuestion, ...]" = ()
    """Calls that run something of the user's own, each of which is tried."""


class TriedRow(FrozenConfig):
    """A row that the reward is tried on."""

    place: str
    """Such as: the first row of the data set."""
    problem: dict[str, Any]
    """As it stands in the file."""
    right: tuple[str, ...]
    """Its own answer in the spellings that rewards ask for, the plain one first; none if it has no answer."""
    others: tuple[str, ...]
    """Texts that the reward is tried on besides; one that it can judge is enough."""


class CallQuestion(FrozenConfig):
    """One call on two prompts with two answers each."""

    import_path: str
    """What of the call is the user's own."""
    call: ModelFunctionCall
    head: Head
    ppo: PPOConfig | None
    dpo: DPOConfig = DPOConfig()
    declared: tuple[Key, ...]
    """Keys of the graph that are not built in."""


class Declared(FrozenConfig):
    """The keys that something of the user's own says it reads and makes."""

    inputs: dict[str, tuple[Key, ...]] = {}
    """By the type of the call; under "" those of a loss or an advantage."""
    outputs: dict[str, tuple[Key, ...]] = {}

    def names(self, attribute: Literal["inputs", "outputs"], call_type: CallType | None = None) -> tuple[str, ...]:
        """Of the keys of one type of call, each once."""
        keys = getattr(self, attribute).get(call_type.value if call_type is not None else "", ())
        return tuple(dict.fromkeys(key.name for key in keys))

    @property
    def keys(self) -> tuple[Key, ...]:
        """All of them."""
        return tuple(key for table in (self.inputs, self.outputs) for keys in table.values() for key in keys)


class Problem(FrozenConfig):
    """One thing that is wrong with a user's code."""

    import_path: str
    message: str
    """With the file and the line, where there is one."""
    hint: str = ""
    kind: Literal["missing_module", "no_sandbox", "untried", "doubtful", "code"] = "code"
    """`missing_module`: a module that the environment of this process does not have; `no_sandbox`: it runs in
    sandboxes, and this machine can make none; `untried`: it asks for what only a trial has, and nothing is known to be
    wrong; `doubtful`: it works, and may not be what is meant."""


class UsedFile(FrozenConfig):
    """A file of the user's own that the process has loaded."""

    name: str
    """Below its import root, with slashes."""
    path: Path
    size_bytes: int


class Findings(FrozenConfig):
    """The findings."""

    problems: tuple[Problem, ...] = ()
    sandboxed: tuple[str, ...] = ()
    """Import paths of what runs in sandboxes, one of which was made here."""
    declared: dict[str, Declared] = {}
    """By import path."""
    files: tuple[UsedFile, ...] = ()
    """Modules, those beside them in their packages, and what was read while they ran."""
    not_kept: tuple[str, ...] = ()
    """Paths of files that were read, and are too large to be kept."""
    packages: dict[str, str] = {}
    """Versions of the installed packages that the modules loaded, by name."""


def users_paths(names: Iterable[str]) -> tuple[str, ...]:
    """Those that are import paths of something that has to be looked at, each once."""
    return tuple(dict.fromkeys(name for name in names if ":" in name and name not in SHIPPED))
