"""What users' files import, and nothing deeper: rewards, losses, advantages, interfaces, agents, experiments.

    from corral.api import Key, PPOConfig, TokenLosses

A name is looked up where it is defined when it is asked for, so that a reward imports no torch. What is here stays; a
change of it is a change of the version.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.agents import (
        Endpoint,
        Episode,
        EpisodeEndedError,
        JudgeError,
        Outcome,
        RefusedError,
        Session,
        Task,
        ToolCall,
        Turn,
        feedback,
        program,
        single_turn,
        tools,
    )
    from corral.experiments.async_ppo import AsyncPPOExperiment
    from corral.experiments.config.algorithm import PPOConfig
    from corral.experiments.config.base import FrozenConfig
    from corral.experiments.dpo import DPOExperiment
    from corral.experiments.ppo import PPOExperiment
    from corral.experiments.reward_model import RewardModelExperiment
    from corral.experiments.sft import SFTExperiment
    from corral.scheduling.keys import Key, built_in
    from corral.scheduling.model_function_call import CallType, ModelFunctionCall
    from corral.workers.algorithms.advantage import AdvantageBatch, AdvantageEstimator
    from corral.workers.algorithms.base import ModelInterface, compute_logprobs, response_mask
    from corral.workers.algorithms.functional.advantages import group_relative
    from corral.workers.algorithms.functional.packed import per_token
    from corral.workers.algorithms.functional.policy_losses import importance_ratio
    from corral.workers.algorithms.functional.token_losses import TokenLosses
    from corral.workers.algorithms.interfaces import InterfaceSettings
    from corral.workers.algorithms.policy_loss import PolicyLoss, center_logprobs, ppo
    from corral.workers.backends.base import AnyEngine
    from corral.workers.backends.micro_batches import MicroBatch
    from corral.workers.backends.token_scores import TokenScores
    from corral.workers.data.sequence_sample import SequenceSample, answer_slices
    from corral.workers.rewards.contract import StopTrialError
    from corral.workers.sandbox.base import needs_sandbox
    from corral.workers.sandbox.bubblewrap import Bubblewrap

_NAMES_BY_MODULE = {
    "corral.agents": (
        "Endpoint",
        "Episode",
        "EpisodeEndedError",
        "JudgeError",
        "Outcome",
        "RefusedError",
        "Session",
        "Task",
        "ToolCall",
        "Turn",
        "feedback",
        "program",
        "single_turn",
        "tools",
    ),
    "corral.experiments.async_ppo": ("AsyncPPOExperiment",),
    "corral.experiments.config.algorithm": ("PPOConfig",),
    "corral.experiments.config.base": ("FrozenConfig",),
    "corral.experiments.dpo": ("DPOExperiment",),
    "corral.experiments.ppo": ("PPOExperiment",),
    "corral.experiments.reward_model": ("RewardModelExperiment",),
    "corral.experiments.sft": ("SFTExperiment",),
    "corral.scheduling.keys": ("Key", "built_in"),
    "corral.scheduling.model_function_call": ("CallType", "ModelFunctionCall"),
    "corral.workers.algorithms.advantage": ("AdvantageBatch", "AdvantageEstimator"),
    "corral.workers.algorithms.base": ("ModelInterface", "compute_logprobs", "response_mask"),
    "corral.workers.algorithms.functional.advantages": ("group_relative",),
    "corral.workers.algorithms.functional.packed": ("per_token",),
    "corral.workers.algorithms.functional.policy_losses": ("importance_ratio",),
    "corral.workers.algorithms.functional.token_losses": ("TokenLosses",),
    "corral.workers.algorithms.interfaces": ("InterfaceSettings",),
    "corral.workers.algorithms.policy_loss": ("PolicyLoss", "center_logprobs", "ppo"),
    "corral.workers.backends.base": ("AnyEngine",),
    "corral.workers.backends.micro_batches": ("MicroBatch",),
    "corral.workers.backends.token_scores": ("TokenScores",),
    "corral.workers.data.sequence_sample": ("SequenceSample", "answer_slices"),
    "corral.workers.rewards.contract": ("StopTrialError",),
    "corral.workers.sandbox.base": ("needs_sandbox",),
    "corral.workers.sandbox.bubblewrap": ("Bubblewrap",),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "AdvantageBatch",
    "AdvantageEstimator",
    "AnyEngine",
    "AsyncPPOExperiment",
    "Bubblewrap",
    "CallType",
    "DPOExperiment",
    "Endpoint",
    "Episode",
    "EpisodeEndedError",
    "FrozenConfig",
    "InterfaceSettings",
    "JudgeError",
    "Key",
    "MicroBatch",
    "ModelFunctionCall",
    "ModelInterface",
    "Outcome",
    "PPOConfig",
    "PPOExperiment",
    "PolicyLoss",
    "RefusedError",
    "RewardModelExperiment",
    "SFTExperiment",
    "SequenceSample",
    "Session",
    "StopTrialError",
    "Task",
    "TokenLosses",
    "TokenScores",
    "ToolCall",
    "Turn",
    "answer_slices",
    "built_in",
    "center_logprobs",
    "compute_logprobs",
    "feedback",
    "group_relative",
    "importance_ratio",
    "needs_sandbox",
    "per_token",
    "ppo",
    "program",
    "response_mask",
    "single_turn",
    "tools",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"corral.api has no {name!r}; it has {', '.join(sorted(_MODULE_BY_NAME))}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULE_BY_NAME)
