"""Asynchronous PPO: rollout workers make trajectories all the time, and model workers train on them.

    trajectories ──┬──► actor_inf ──proximal_logprobs──┐     only with the decoupled loss
    (prompt group) ├──► ref_inf ────ref_logprobs───────┤     only with a reference model
                   └───────────────────────────────────┴──► actor_train ──► new weights

With group-relative advantages and no critic this is GRPO. All five kinds of workers take part.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from corral.experiments.checks import (
    MODEL_CONTEXT,
    check_concurrency,
    check_imports,
    check_length,
    check_model,
    check_ppo,
)
from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.model import ModelConfig, TrainedModelConfig
from corral.experiments.config.rollout import EXACT_MATCH, EngineConfig, RolloutConfig
from corral.experiments.errors import ConfigProblem
from corral.experiments.experiment import Experiment, ExperimentConfig
from corral.experiments.inputs.model_directory import ModelFacts
from corral.experiments.inputs.tokens import LengthLimits
from corral.experiments.worker_specs import (
    DatasetSpec,
    GenerationServerSpec,
    GserverManagerSpec,
    ModelRoleSpec,
    RewardSpec,
    RolloutWorkerSpec,
)
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, PublishWeightsHook
from corral.scheduling.packing import MicroBatchSpec

TRAJECTORY_KEYS = ("input_ids", "prompt_mask", "old_logprobs", "versions", "rewards", "seq_no_eos_mask")


class AsyncPPOExperiment(Experiment):
    """PPO on answers that the policy, at most `max_head_offpolicyness` versions ago, gave to the dataset's prompts."""

    experiment: Literal["async_ppo"] = "async_ppo"
    """Asynchronous PPO and GRPO."""
    allocation: str = "hf:d1+fsdp:d1"
    """Who generates and who trains, on how many GPUs or processes: hf:d2+fsdp:d4."""
    actor: TrainedModelConfig
    """The policy."""
    ref: ModelConfig | None = None
    """The reference model of the KL term; None trains without one."""
    ppo: PPOConfig = PPOConfig()
    """The algorithm."""
    rollout: RolloutConfig = RolloutConfig()
    """How answers are made and judged."""
    engine: EngineConfig = EngineConfig()
    """The generation engine."""

    generates: ClassVar[bool] = True

    @property
    def roles(self) -> tuple[str, ...]:
        return ("actor",) if self.ref is None else ("actor", "ref")

    @property
    def trained(self) -> TrainedModelConfig:
        return self.actor

    @property
    def needs_answers(self) -> bool:
        # A reward of one's own may judge without a reference.
        return self.rollout.reward == EXACT_MATCH

    def calls(self) -> list[ModelFunctionCall]:
        """The model function calls of one step."""
        made: list[ModelFunctionCall] = []
        if self.ppo.use_decoupled_loss:
            made.append(self._inference("actor_inf", self.actor, role="actor", output="proximal_logprobs"))
        if self.ref is not None:
            made.append(self._inference("ref_inf", self.ref, role="ref", output="ref_logprobs"))
        outputs = [key for call in made for key in call.output_keys]
        train = ModelFunctionCall(
            name="actor_train",
            model_name=ModelName("actor"),
            call_type=CallType.TRAIN_STEP,
            implementation="ppo_actor",
            n_seqs=self.train_batch_size,
            input_keys=(*TRAJECTORY_KEYS, *outputs),
            micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=self.actor.max_tokens_per_micro_batch),
            post_hooks=(PublishWeightsHook(),),
        )
        return [*made, train]

    def _inference(self, name: str, model: ModelConfig, *, role: str, output: str) -> ModelFunctionCall:
        return ModelFunctionCall(
            name=name,
            model_name=ModelName(role),
            call_type=CallType.INFERENCE,
            implementation="ppo_actor",
            n_seqs=self.train_batch_size,
            input_keys=("input_ids", "prompt_mask"),
            output_keys=(output,),
            output_key_remap={"logprobs": output},
            micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=model.max_tokens_per_micro_batch),
        )

    def initial_setup(self) -> ExperimentConfig:
        dataset = self.read_dataset()
        graph = build_dataflow([*self.calls(), *self.evaluate_calls()], TRAJECTORY_KEYS)
        reward = RewardSpec(
            function=self.rollout.reward,
            timeout_s=self.rollout.reward_timeout_s,
            retries=self.rollout.reward_retries,
        )
        workers = self.trainer_specs(
            dataset,
            graph,
            self._role_specs(),
            reward=reward,
            max_head_offpolicyness=self.rollout.max_head_offpolicyness,
            temperature=self.rollout.sampling.temperature,
        )
        workers += [
            GenerationServerSpec(index=index, initial_weights=self.actor.path, engine=self.engine)
            for index in range(self.num_workers("generation_server"))
        ]
        workers.append(
            GserverManagerSpec(
                num_generation_servers=self.num_workers("generation_server"),
                train_batch_size=self.train_batch_size,
                rollout=self.rollout,
            )
        )
        workers += self._rollout_workers(dataset)
        return ExperimentConfig(graph=graph, workers=tuple(workers))

    def _role_specs(self) -> list[ModelRoleSpec]:
        actor = ModelRoleSpec(
            role="actor", model=self.actor.without_optimizer(), optimizer=self.actor.optimizer, ppo=self.ppo
        )
        if self.ref is None:
            return [actor]
        return [actor, ModelRoleSpec(role="ref", model=self.ref, optimizer=None, ppo=self.ppo)]

    def _rollout_workers(self, dataset: DatasetSpec) -> list[RolloutWorkerSpec]:
        count = self.num_workers("rollout_worker")
        return [
            RolloutWorkerSpec(
                index=index,
                num_rollout_workers=count,
                dataset=dataset,
                tokenizer=self.actor.path,
                group_size=self.ppo.group_size,
                train_batch_size=self.train_batch_size,
                total_train_epochs=self.control.total_train_epochs,
                rollout=self.rollout,
            )
            for index in range(count)
        ]

    def length_limits(self) -> LengthLimits:
        return LengthLimits(self.actor.path, max_prompt_tokens=self.dataset.max_prompt_tokens)

    def find_own_problems(self, *, num_rows: int | None) -> Iterator[ConfigProblem]:
        facts, problems = check_model(self.actor, ("actor",))
        yield from problems
        yield from self._ref_problems(facts)
        actor = self.known_meshes().get("actor")
        yield from check_ppo(
            self.ppo,
            has_ref=self.ref is not None,
            train_batch_size=self.train_batch_size,
            dp=actor.dims.dp if actor is not None else 1,
        )
        yield from check_concurrency(self.rollout, train_batch_size=self.train_batch_size)
        yield from check_imports(self.rollout)
        yield from self._length_problems(facts)
        yield from self.check_training(facts, num_rows=num_rows)

    def _ref_problems(self, actor: ModelFacts | None) -> Iterator[ConfigProblem]:
        if self.ref is None:
            return
        facts, problems = check_model(self.ref, ("ref",))
        yield from problems
        if actor is not None and facts is not None and actor.vocab_size != facts.vocab_size:
            yield ConfigProblem(
                message=f"ref has a vocabulary of {facts.vocab_size}, the actor one of {actor.vocab_size}",
                hint="use the model that the actor starts from, or one with the same tokenizer",
                path=("ref", "path"),
                shown=str(self.ref.path),
            )

    def _length_problems(self, facts: ModelFacts | None) -> Iterator[ConfigProblem]:
        limits = [
            ("engine.max_total_tokens", self.engine.max_total_tokens),
            ("actor.max_tokens_per_micro_batch", self.actor.max_tokens_per_micro_batch),
        ]
        if self.ref is not None:
            limits.append(("ref.max_tokens_per_micro_batch", self.ref.max_tokens_per_micro_batch))
        if facts is not None and facts.max_position_embeddings is not None:
            limits.append((MODEL_CONTEXT, facts.max_position_embeddings))
        for limit_name, limit in limits:
            yield from check_length(
                max_prompt_tokens=self.dataset.max_prompt_tokens,
                max_new_tokens=self.rollout.sampling.max_new_tokens,
                limit=limit,
                limit_name=limit_name,
                path=("rollout", "sampling", "max_new_tokens"),
            )

    def find_warnings(self) -> Iterator[str]:
        yield from super().find_warnings()
        if self.ref is not None and self.ppo.kl.coef == 0.0:
            yield "ref has no effect on training while ppo.kl.coef is 0; leave it out to save its memory"
        if not self.ppo.use_decoupled_loss and "behav_imp_weight_cap" in self.ppo.model_fields_set:
            yield "ppo.behav_imp_weight_cap has no effect without ppo.use_decoupled_loss"
