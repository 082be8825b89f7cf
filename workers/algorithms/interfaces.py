"""The implementation that a call names -> an interface with its settings.

    "ppo_actor"          ──INTERFACES──┐
                                       ├──► factory(InterfaceSettings) ──► ModelInterface
    "my_pkg.mine:Margin" ──import──────┘

One of the user's own is a class (or function) that takes the settings and gives a `ModelInterface`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from corral.experiments.config.algorithm import CriticConfig, DPOConfig, PPOConfig
from corral.experiments.worker_specs import BehaviourSpec
from corral.workers.algorithms.base import ModelInterface
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.algorithms.ppo_critic import PPOCriticInterface
from corral.workers.algorithms.preferences import DPOInterface, PairedRewardInterface, RewardInterface
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.algorithms.teacher import TeacherInterface
from corral.workers.user_code.loading import built_in_or_loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceSettings:
    """The plan's settings for the interface of a role."""

    ppo: PPOConfig | None = None
    critic: CriticConfig = field(default_factory=CriticConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    behaviour: BehaviourSpec = field(default_factory=BehaviourSpec)
    """The generator of the answers that are trained on."""
    dtype: str = "float32"
    """Type of the matrix products of the role's engine."""
    seed: int = 0
    """The trial's."""
    taught_sources: tuple[str, ...] = ()
    """Sources of rows that have teachers of their own: of the actor all, of such a teacher its own."""

    @property
    def temperature(self) -> float:
        """That answers are sampled with."""
        return self.behaviour.sampling.temperature

    def require_ppo(self) -> PPOConfig:
        """The settings of PPO.

        Raises:
            ValueError: if the plan has none.
        """
        if self.ppo is None:
            raise ValueError("the plan has no PPO settings for this role")
        return self.ppo


InterfaceFactory = Callable[[InterfaceSettings], ModelInterface]


INTERFACES: Mapping[str, InterfaceFactory] = {
    "ppo_actor": lambda settings: PPOActorInterface(
        settings.require_ppo(),
        behaviour=settings.behaviour,
        dtype=settings.dtype,
        seed=settings.seed,
        taught_sources=settings.taught_sources,
    ),
    "ppo_critic": lambda settings: PPOCriticInterface(settings.require_ppo(), settings.critic, seed=settings.seed),
    "teacher": lambda settings: TeacherInterface(
        temperature=settings.temperature,
        top_k=settings.require_ppo().distillation.top_k,
        sources=settings.taught_sources,
    ),
    "reward": lambda settings: RewardInterface(),
    "paired_reward": lambda settings: PairedRewardInterface(),
    "dpo": lambda settings: DPOInterface(settings.dpo),
    "sft": lambda settings: SFTInterface(),
}


def make_interface(implementation: str, settings: InterfaceSettings) -> ModelInterface:
    """The interface of this name or import path.

    Raises:
        ValueError: if there is none, or the settings are not enough for it.
        ImportError: if its module cannot be imported.
    """
    interface = built_in_or_loaded(implementation, INTERFACES, what="interface")(settings)
    if not isinstance(interface, ModelInterface):
        raise ValueError(f"{implementation!r} made a {type(interface).__name__}, not a ModelInterface; let it be one")
    return interface
