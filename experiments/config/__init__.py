"""Configuration schema: pydantic models without torch, one module per concern."""

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.base import FrozenConfig
from corral.experiments.config.cluster import (
    ClusterConfig,
    GroupConfig,
    GroupsConfig,
    LaunchConfig,
    SupervisionConfig,
)
from corral.experiments.config.control import TrainControl
from corral.experiments.config.data import DatasetConfig, EvaluationConfig
from corral.experiments.config.model import ModelConfig, OptimizerConfig, TrainedModelConfig
from corral.experiments.config.rollout import EXACT_MATCH, EngineConfig, ImportPath, RolloutConfig, SamplingConfig

__all__ = [
    "EXACT_MATCH",
    "ClusterConfig",
    "DatasetConfig",
    "EngineConfig",
    "EvaluationConfig",
    "FrozenConfig",
    "GroupConfig",
    "GroupsConfig",
    "ImportPath",
    "LaunchConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PPOConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SupervisionConfig",
    "TrainControl",
    "TrainedModelConfig",
]
