"""What users' files import, and nothing deeper: rewards, losses, advantages, interfaces, agents, experiments.

    from corral.api import Key, PPOConfig, TokenLosses

A name is looked up where it is defined when it is asked for, so that a reward imports no torch. What is here stays; a
change of it is a change of the version.
"""

# ruff: noqa: I001  (it would give each name that is handed on a statement of its own)

import ast
from importlib import import_module
from pathlib import Path
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
    from corral.experiments.row_experiment import DPOExperiment as DPOExperiment
    from corral.experiments.ppo import PPOExperiment as PPOExperiment
    from corral.experiments.row_experiment import RewardModelExperiment as RewardModelExperiment
    from corral.experiments.row_experiment import SFTExperiment as SFTExperiment
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
    from corral.workers.algorithms.functional.losses import TokenLosses as TokenLosses
    from corral.workers.algorithms.interfaces import InterfaceSettings as InterfaceSettings
    from corral.workers.algorithms.pair_losses import PairScores as PairScores
    from corral.workers.algorithms.policy_loss import (
        PolicyLoss as PolicyLoss,
        center_logprobs as center_logprobs,
        ppo as ppo,
    )
    from corral.workers.backends.base import AnyEngine as AnyEngine
    from corral.workers.backends.micro_batches import MicroBatch as MicroBatch
    from corral.workers.backends.base import TokenScores as TokenScores
    from corral.workers.data.sequence_sample import SequenceSample as SequenceSample, answer_slices as answer_slices
    from corral.workers.rewards.contract import StopTrialError as StopTrialError
    from corral.workers.sandbox.base import needs_sandbox as needs_sandbox
    from corral.workers.sandbox.bubblewrap import Bubblewrap as Bubblewrap

_MODULE_BY_NAME = {
    alias.name: statement.module
    for statement in ast.walk(ast.parse(Path(__file__).read_bytes()))
    if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.startswith("corral.")
    for alias in statement.names
}
"""What the statements above say."""


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"corral.api has no {name!r}; it has {', '.join(sorted(_MODULE_BY_NAME))}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULE_BY_NAME)
