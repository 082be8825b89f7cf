"""The rewards that ship; `rollout.reward` names them by these import paths. See docs/rewards.md.

rollout:
  reward: corral.workers.rewards:math

One is looked up when it is asked for, so that nobody waits for what another one imports.
"""

from importlib import import_module
from typing import Any

_MODULE_BY_NAME = {
    **dict.fromkeys(("Format", "Length", "Repetition", "exact_match", "multiple_choice", "no_reward"), "texts"),
    **dict.fromkeys(("all_unit_tests", "unit_tests"), "programs"),
    "Judge": "judge",
    "math": "mathematics",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"{__name__} has no {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULE_BY_NAME)
