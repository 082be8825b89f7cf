"""Synchronous PPO: generation is a call of the graph, and every step trains on answers of the newest policy.

    prompts ──► actor_gen ──answers──► calls of policy.py ──► new weights ──┐
                    ▲                                                       │
                    └───────────────────────────────────────────────────────┘

Workers: the master and the model workers. The policy generates on its own ranks, or a replica of it does on ranks of
their own, which takes its weights over before each step: a role of the allocation named `generation`.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from corral.experiments.config.rollout import EngineConfig
from corral.experiments.inputs.parameters import count_parameters
from corral.experiments.policy import PolicyExperiment
from corral.experiments.worker_specs import BehaviourSpec, GenerationSpec, ModelRoleSpec
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, PullWeightsHook
from corral.scheduling.parallel import Mesh

GENERATE = "generate"
"""What a call that generates is implemented by."""
GENERATION = "generation"
"""What an allocation calls the ranks of a replica that generates."""


class PPOExperiment(PolicyExperiment):
    """PPO on answers that the policy has just given to the next prompts of the dataset."""

    experiment: str = "ppo"
    """Synchronous PPO and GRPO."""
    allocation: str = "fsdp:d1"
    """Layout of each role's model on GPUs or processes: actor,ref=fsdp:d2,critic,reward=fsdp:d2."""
    engine: EngineConfig = EngineConfig()
    """The generation engine of each data-parallel rank."""

    generates: ClassVar[bool] = False

    @property
    def source(self) -> Literal["prompts"]:
        return "prompts"

    @property
    def has_replica(self) -> bool:
        """Whether a replica of the policy generates, on ranks of its own."""
        return any(GENERATION in group.roles for group in self.parsed_allocation.training)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return (*super().roles, GENERATION) if self.has_replica else super().roles

    def mesh_of(self, model: ModelName) -> Mesh:
        return self.meshes[GENERATION] if model.replica_id else super().mesh_of(model)

    def generate_call(self) -> ModelFunctionCall:
        """The call that answers prompts."""
        return ModelFunctionCall(
            name="actor_gen",
            model_name=ModelName("actor", int(self.has_replica)),
            call_type=CallType.GENERATE,
            implementation=GENERATE,
            n_seqs=self.train_batch_size,
            output_keys=self.trajectory_keys,
            pre_hooks=(PullWeightsHook(source=ModelName("actor")),) if self.has_replica else (),
        )

    def replicas(self, first: ModelRoleSpec) -> list[ModelRoleSpec]:
        if not self.has_replica:
            return []
        # It takes over what the policy and its adapters amount to, and trains nothing.
        counts = count_parameters(first.model, head=first.head)
        untrained = {"replica_id": 1, "optimizer": None, "lora": None, "recompute": "none", "num_parameters": counts}
        return [first.model_copy(update=untrained)]

    def calls(self) -> list[ModelFunctionCall]:
        return [self.generate_call(), *self.training_calls()]

    @property
    def sample_keys(self) -> tuple[str, ...]:
        return ()

    def rank_settings(self) -> Mapping[str, Any]:
        generation = GenerationSpec(
            sampling=self.rollout.sampling,
            group_size=self.ppo.group_size,
            max_running_requests=self.engine.max_running_requests,
            teacher_prompt_tokens=self.teacher_prompt_tokens,
            experts=self.routed_experts,
        )
        # On the trainer's float32 weights as they are.
        behaviour = BehaviourSpec(
            sampling=self.rollout.sampling,
            has_row_temperatures=self.dataset.names_temperatures,
            routes_anew=self.routes_anew,
        )
        return {**super().rank_settings(), "generation": generation, "behaviour": behaviour}
