"""What users' files import, and nothing deeper: rewards, losses, advantages, interfaces, agents, experiments.

    from corral.api import Key, PPOConfig, TokenLosses

A name is looked up where it is defined when it is asked for, so that a reward imports no torch. What is here stays; a
change of it is a change of the version.
"""

# ruff: noqa: I001  (it would give each name that is handed on a statement of its own)

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.agents import (
        Endpoint as Endpoint,
        Episode as Episode,
        EpisodeEndedError as EpisodeEndedError,
        JudgeError as JudgeError,
        Outcome as Outcome,
        RefusedError as RefusedError,
        Session as Session,
        Task as Task,
        ToolCall as ToolCall,
        Turn as Turn,
        feedback as feedback,
        program as program,
        single_turn as single_turn,
        tools as tools,
    )
    from corral.experiments.async_ppo import AsyncPPOExperiment as AsyncPPOExperiment
    from corral.experiments.config.algorithm import DPOConfig as DPOConfig, PPOConfig as PPOConfig
    from corral.experiments.config.base import FrozenConfig as FrozenConfig
    from corral.experiments.dpo import DPOExperiment as DPOExperiment
    from corral.experiments.ppo import PPOExperiment as PPOExperiment
    from corral.experiments.reward_model import RewardModelExperiment as RewardModelExperiment
    from corral.experiments.sft import SFTExperiment as SFTExperiment
    from corral.scheduling.keys import Key as Key, built_in as built_in
    from corral.scheduling.model_function_call import CallType as CallType, ModelFunctionCall as ModelFunctionCall
    from corral.workers.algorithms.advantage import (
        AdvantageBatch as AdvantageBatch,
        AdvantageEstimator as AdvantageEstimator,
    )
    from corral.workers.algorithms.base import (
        ModelInterface as ModelInterface,
        compute_logprobs as compute_logprobs,
        response_mask as response_mask,
    )
    from corral.workers.algorithms.functional.advantages import group_relative as group_relative
    from corral.workers.algorithms.functional.packed import per_token as per_token
    from corral.workers.algorithms.functional.policy_losses import importance_ratio as importance_ratio
    from corral.workers.algorithms.functional.token_losses import TokenLosses as TokenLosses
    from corral.workers.algorithms.interfaces import InterfaceSettings as InterfaceSettings
    from corral.workers.algorithms.pair_losses import PairScores as PairScores
    from corral.workers.algorithms.policy_loss import (
        PolicyLoss as PolicyLoss,
        center_logprobs as center_logprobs,
        ppo as ppo,
    )
    from corral.workers.backends.base import AnyEngine as AnyEngine
    from corral.workers.backends.micro_batches import MicroBatch as MicroBatch
    from corral.workers.backends.token_scores import TokenScores as TokenScores
    from corral.workers.data.sequence_sample import SequenceSample as SequenceSample, answer_slices as answer_slices
    from corral.workers.rewards.contract import StopTrialError as StopTrialError
    from corral.workers.sandbox.base import needs_sandbox as needs_sandbox
    from corral.workers.sandbox.bubblewrap import Bubblewrap as Bubblewrap


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
    "corral.experiments.config.algorithm": ("DPOConfig", "PPOConfig"),
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
    "corral.workers.algorithms.pair_losses": ("PairScores",),
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


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"corral.api has no {name!r}; it has {', '.join(sorted(_MODULE_BY_NAME))}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULE_BY_NAME)
