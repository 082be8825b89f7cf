"""PolicyExperiment: the common part of synchronous and asynchronous PPO: the roles, and the calls that train them.

    answers ──┬──► actor_inf ───proximal_logprobs──┐     with the decoupled loss and several updates a step
              ├──► ref_inf ─────ref_logprobs───────┤     with a reference model, which may follow the actor (ema)
              ├──► teacher_inf ─teacher_logprobs───┤     with a teacher, of whom the actor learns on its own answers
              ├──► rew_inf ─────model_rewards──────┤     with a reward model, in place of the reward function's
              ├──► critic_inf ──values─────────────┤     with a critic
              └────────────────────────────────────┼──► actor_train ──► new weights
                                                   └──► critic_train

Without a critic, advantages compare the answers to one prompt: GRPO and its kin.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from corral.experiments.checks.data import MODEL_CONTEXT
from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.data import RowKind
from corral.experiments.config.endpoint import checked_teacher_names
from corral.experiments.config.model import (
    ActorModelConfig,
    CriticModelConfig,
    ModelConfig,
    ReferenceModelConfig,
    RewardModelConfig,
)
from corral.experiments.config.presets import SHOWING
from corral.experiments.config.rollout import GenerationConfig, RewardConfig, remarks_size, reported_parts
from corral.experiments.experiment import Experiment
from corral.experiments.inputs.decoder_config import MIXTURES, decoder_sizes, is_mixture
from corral.experiments.inputs.model_directory import context_length, model_type, read_config
from corral.experiments.prompts.length_limits import LengthLimits
from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.scheduling.keys import (
    EPISODE_KEYS,
    ROUTED_EXPERTS,
    TEACHER_PROMPT,
    TEMPERATURES,
    Key,
    keys_of_teachers,
    remarks_key,
    reward_parts_key,
    teacher_keys,
    teacher_prompt_key,
)
from corral.scheduling.model_function_call import (
    CallType,
    ModelFunctionCall,
    ModelName,
    PushWeightsHook,
)

TRAJECTORY_KEYS = ("input_ids", "prompt_mask", "old_logprobs", "versions", "rewards", "seq_no_eos_mask")
PROXIMAL = "proximal_logprobs"
MODEL_REWARDS = "model_rewards"
"""What the graph calls the scores of a reward model, beside the `rewards` of the reward function."""


class PolicyExperiment(Experiment):
    """PPO on answers of the policy."""

    actor: ActorModelConfig
    """The policy."""
    critic: CriticModelConfig | None = None
    """The critic of ppo.advantage: gae; None trains without one."""
    ref: ReferenceModelConfig | None = None
    """The reference model of the KL term; None trains without one."""
    teacher: ModelConfig | None = None
    """The model that ppo.distillation learns from, with the actor's tokenizer; None trains without one."""
    teachers: Annotated[dict[str, ModelConfig], AfterValidator(checked_teacher_names)] = {}
    """In its place a teacher for each of `dataset.sources`, by the name of the source whose rows it judges."""
    reward_model: RewardModelConfig | None = None
    """A model that rewards come from, in place of rollout.reward's; None asks the function alone."""
    ppo: PPOConfig = PPOConfig()
    """The algorithm."""
    rollout: GenerationConfig = GenerationConfig()
    """How answers are made and judged."""
    samples_per_step: int | None = Field(default=8, ge=0)
    """Prompts of each train step whose answers are kept for `rl-samples`, at least one for each data-parallel rank; 0
    keeps none, None all. The newest 512 MB stay."""

    beside_first: ClassVar[frozenset[str]] = frozenset({"critic", "ref", "reward"})

    @property
    def teacher_roles(self) -> tuple[str, ...]:
        return tuple(role for role in self.models if role == "teacher" or role.startswith("teacher_"))

    @property
    def has_teacher(self) -> bool:
        return bool(self.teacher_roles or self.rollout.served_teachers)

    @property
    def _served_keys(self) -> tuple[Key, ...]:
        """What comes with the answers, since teachers outside of the trial have said it."""
        return tuple(
            key for name in self.rollout.served_teachers for key in keys_of_teachers([name] if name else [], None)
        )

    @property
    def taught_sources(self) -> tuple[str, ...]:
        """Sources of rows that have teachers of their own."""
        return (*self.teachers, *filter(None, self.rollout.served_teachers))

    @cached_property
    def models(self) -> dict[str, ModelConfig]:
        return {**super().models, **{f"teacher_{source}": model for source, model in self.teachers.items()}}

    def key_of(self, role: str) -> str:
        source = role.removeprefix("teacher_")
        return f"teachers.{source}" if source != role and source in self.teachers else super().key_of(role)

    @property
    def row_kind(self) -> RowKind:
        # A reward of one's own may judge without a reference.
        return "answers" if self.rollout.compares else "prompts"

    @cached_property
    def routed_experts(self) -> RoutedExpertsSpec | None:
        """The experts that samples carry from who makes them to who trains on them; None where they carry none."""
        sizes = decoder_sizes(self.actor.path)
        if sizes is None or not sizes.sparse_layers or model_type(self.actor.path) not in MIXTURES:
            return None
        return RoutedExpertsSpec(
            num_layers=sizes.num_layers,
            expert_layers=tuple(sorted(sizes.sparse_layers)),
            num_experts=sizes.num_experts,
            top_k=sizes.experts_per_token,
        )

    @property
    def routes_anew(self) -> bool:
        """Whether the actor is a mixture that routes tokens without the generator's recorded experts."""
        return self.routed_experts is None and is_mixture(read_config(self.actor.path) or {})

    @property
    def sample_keys(self) -> tuple[str, ...]:
        return self.trajectory_keys

    @property
    def trajectory_keys(self) -> tuple[str, ...]:
        """The keys that come with the answers."""
        of_experts = () if self.routed_experts is None else (ROUTED_EXPERTS,)
        for_people = (key.name for key in self._keys_for_people)
        of_teachers = [key.name for key in self._served_keys] + [TEACHER_PROMPT] * bool(self.teacher_prompt_tokens)
        of_episodes = EPISODE_KEYS if self.rollout.makes_episodes else ()
        return (*TRAJECTORY_KEYS, *self._keys_of_rows, *of_experts, *for_people, *of_teachers, *of_episodes)

    @property
    def _keys_of_rows(self) -> tuple[str, ...]:
        """What rows say of their answers that who computes their log-probabilities has to know."""
        return (TEMPERATURES,) if self.dataset.names_temperatures else ()

    @property
    def model_keys(self) -> tuple[Key, ...]:
        of_experts = () if self.routed_experts is None else (self.routed_experts.key,)
        of_teachers = teacher_keys(self.ppo.distillation.top_k) if self.teacher_roles else ()
        of_prompts = (teacher_prompt_key(tokens),) if (tokens := self.teacher_prompt_tokens) else ()
        return (*of_experts, *self._keys_for_people, *of_teachers, *of_prompts, *self._served_keys)

    @property
    def teacher_prompt_tokens(self) -> int:
        """Longest prompt of teachers' own that samples carry; 0 where they carry none."""
        return self.dataset.max_prompt_tokens if self.teacher_roles and self.dataset.has_teacher_prompts else 0

    @property
    def _keys_for_people(self) -> tuple[Key, ...]:
        parts = reported_parts(self.rollout.reward)
        size_bytes = remarks_size(self.rollout.reward, of_episodes=self.rollout.makes_episodes)
        return (
            *((reward_parts_key(len(parts)),) if parts else ()),
            *((remarks_key(size_bytes),) if size_bytes else ()),
        )

    @property
    def calls_for_proximal(self) -> bool:
        """Whether the proximal policy is computed before the train step.

        The only update of a step is computed with the weights that the step begins with: the proximal policy is then
        what the train step computes anyway. Not so with dropout, which a train step alone has, nor if another call
        reads the numbers.
        """
        return self.ppo.use_decoupled_loss and (self._proximal_may_differ or self._counts_what_is_left)

    @property
    def _proximal_may_differ(self) -> bool:
        """Whether what the train step computes may be another thing, or somebody else reads the proximal policy's."""
        is_read = self.actor.interface is not None or PROXIMAL in self._own_keys()
        return is_read or self.ppo.updates_per_step > 1 or self._trains_with_dropout

    @property
    def _counts_what_is_left(self) -> bool:
        """Whether it has to be known before the train step which tokens the cap drops.

        A mean over answers divides by the tokens that are left of all sequences of an episode, of which a micro-batch
        may have some.
        """
        return self.rollout.makes_episodes and self.ppo.drops_tokens and self.ppo.loss_reduction != "token_mean"

    @property
    def _trains_with_dropout(self) -> bool:
        of_adapters = self.actor.lora is not None and self.actor.lora.dropout > 0.0
        settings = read_config(self.actor.path) or {}
        return of_adapters or any(
            isinstance(value, int | float) and value > 0 for name, value in settings.items() if "drop" in name
        )

    def calls(self) -> list[ModelFunctionCall]:
        return self.training_calls()

    def training_calls(self) -> list[ModelFunctionCall]:
        """The model function calls from answers to new weights."""
        made: list[ModelFunctionCall] = []

        def infer(name: str, role: str, implementation: str, reads: Sequence[str], outputs: Mapping[str, str]) -> None:
            made.append(self.inference_call(name, role, implementation, input_keys=reads, outputs=outputs))

        masked = ("input_ids", "prompt_mask", *self._keys_of_rows)
        if self.calls_for_proximal:
            routed = masked if self.routed_experts is None else (*masked, ROUTED_EXPERTS)
            infer("actor_inf", "actor", self.actor.implementation, routed, {"logprobs": PROXIMAL})
        if self.ref is not None:
            infer("ref_inf", "ref", "ppo_actor", masked, {"logprobs": "ref_logprobs"})
        names = [key.name for key in teacher_keys(self.ppo.distillation.top_k)]
        for role in self.teacher_roles:
            suffix = role.removeprefix("teacher")
            more = (TEACHER_PROMPT,) if self.teacher_prompt_tokens else ()
            infer(f"{role}_inf", role, "teacher", (*masked, *more), {name: f"{name}{suffix}" for name in names})
        outputs = [key for call in made for key in call.output_keys]
        if self.reward_model is not None:
            # With the keys that an interface of the user's own reads, and those that it makes beside rewards.
            interface = self.reward_model.implementation
            own = self.declared_names(interface, "outputs", CallType.INFERENCE)
            reads = self.declared_names(interface, "inputs", CallType.INFERENCE) or ("input_ids",)
            infer("rew_inf", "reward", interface, reads, {**{key: key for key in own}, "rewards": MODEL_REWARDS})
            outputs.append(MODEL_REWARDS)
        if self.critic is not None:
            infer("critic_inf", "critic", self.critic.implementation, ("input_ids",), {"values": "values"})
            outputs.append("values")
        made.append(
            self._train("actor", self.actor.implementation, (*self._answer_keys(), *outputs, *self._own_keys()))
        )
        if self.critic is not None:
            made.append(self._train("critic", self.critic.implementation, self._critic_keys()))
        return made

    @property
    def own_code(self) -> tuple[str, ...]:
        return (self.ppo.loss, self.ppo.advantage)

    def declared_names(
        self, import_path: str, attribute: Literal["inputs", "outputs"], call_type: CallType | None = None
    ) -> tuple[str, ...]:
        """The keys that something of the user's own says it reads or makes; of what corral has, none."""
        models = (self.actor, self.critic, self.reward_model)
        interfaces = [model.implementation for model in models if model is not None]
        declared = self.declared(self.own_code, interfaces=interfaces).get(import_path)
        return () if declared is None else declared.names(attribute, call_type)

    def _own_keys(self) -> tuple[str, ...]:
        """Further keys that a loss, an advantage or an interface of the user's own reads."""
        made_on_the_way = self.declared_names(self.ppo.advantage, "outputs")
        read = [
            *self.declared_names(self.ppo.advantage, "inputs"),
            *(key for key in self.declared_names(self.ppo.loss, "inputs") if key not in made_on_the_way),
            *self.declared_names(self.actor.implementation, "inputs", CallType.TRAIN_STEP),
        ]
        return tuple(key for key in read if key != "rewards")

    def _answer_keys(self) -> tuple[str, ...]:
        """What comes with the answers, and is read."""
        unread = {TEACHER_PROMPT} if self.reward_model is None else {TEACHER_PROMPT, "rewards"}
        return tuple(key for key in self.trajectory_keys if key not in unread)

    def _critic_keys(self) -> tuple[str, ...]:
        """No more than it reads: a critic on ranks of its own then waits for nothing of the actor's."""
        rewards = "rewards" if self.reward_model is None else MODEL_REWARDS
        of_episodes = EPISODE_KEYS if self.rollout.makes_episodes else ()
        keys = ("input_ids", "prompt_mask", "seq_no_eos_mask", rewards, "values", *of_episodes)
        return (*keys, "old_logprobs", "ref_logprobs", "versions") if self.ppo.kl.is_charged else keys

    def _train(self, role: str, implementation: str, keys: Sequence[str]) -> ModelFunctionCall:
        follows = [PushWeightsHook(target=ModelName("ref"), eta=self.ref.ema)] if self.ref and self.ref.ema else []
        return self.train_call(
            implementation,
            input_keys=tuple(dict.fromkeys(keys)),
            role=role,
            input_key_remap={MODEL_REWARDS: "rewards"} if MODEL_REWARDS in keys else {},
            post_hooks=follows if role == "actor" else [],
        )

    def role_settings(self, role: str) -> Mapping[str, Any]:
        own: dict[str, Any] = {"ppo": self.ppo}
        if role == "actor" or role.startswith("teacher_"):
            own["taught_sources"] = self.taught_sources if role == "actor" else (role.removeprefix("teacher_"),)
        if role == "critic" and self.critic is not None:
            own["critic"] = self.critic.values
        if role == "reward" and self.reward_model is not None:
            own["head"] = self.reward_model.head
        return own

    def rank_settings(self) -> Mapping[str, Any]:
        reward = {name: getattr(self.rollout, name) for name in RewardConfig.model_fields}
        return {"reward": RewardConfig(**reward), "samples_per_step": self.samples_per_step}

    def length_limits(self) -> LengthLimits:
        data = self.dataset
        return LengthLimits(
            self.actor.path, max_prompt_tokens=data.max_prompt_tokens, template_arguments=data.chat_template_kwargs
        )

    def length_bounds(self) -> dict[str, int | None]:
        """What a prompt and its answer together have to fit, by name; None where nobody says it."""
        bounds: dict[str, int | None] = {
            f"{self.key_of(role)}.max_tokens_per_micro_batch": model.max_tokens_per_micro_batch
            for role, model in self.models.items()
        }
        return bounds | {MODEL_CONTEXT: context_length(self.actor.path)}

    def find_warnings(self) -> Iterator[str]:
        yield from super().find_warnings()
        if self.ref is not None and self.ppo.kl.coef == 0.0:
            yield "ref has no effect on training while ppo.kl.coef is 0; leave it out to save its memory"
        if self.has_teacher and self.ppo.distillation.coef == 0.0:
            yield "teacher has no effect while ppo.distillation.coef is 0; ppo.algorithm: distillation sets it"
        if self.dataset.has_teacher_prompts and not self.has_teacher:
            yield "dataset.columns.teacher_prompt has no effect: there is no teacher to read it"
        for endpoint in self.rollout.served_teachers.values():
            if endpoint.path is None:
                yield (
                    f"nobody has compared the tokens of the teacher at {endpoint.url} with the actor's: it is asked by "
                    "their ids, and has to have the same ones; name its directory in `path`, if it can be read here"
                )
        if self.ppo.algorithm in SHOWING and getattr(self.rollout, "demonstrations", None) is None:
            shows = f"ppo.algorithm: {self.ppo.algorithm} shows no answers without rollout.demonstrations of async_ppo"
            yield f"{shows}; name their field"
        if self.critic is not None and not self.ppo.needs_critic:
            yield f"critic has no effect on the policy with ppo.advantage: {self.ppo.advantage}; set it to gae"
        if self.actor.lora is not None and self.actor.lora.dropout > 0.0:
            yield (
                "actor.lora.dropout acts in train steps alone, so the ratios of the policy loss are not 1 even where "
                "nothing has changed; leave it at 0 for PPO"
            )
        if self.routes_anew:
            yield (
                f"the trainer does not replay the generator's experts in models of type {model_type(self.actor.path)}: "
                "it chooses the experts of each token anew, and other ones than the generator here and there; it "
                f"replays {', '.join(MIXTURES)}"
            )
        yield from self._clip_warnings()
        if not self.ppo.use_decoupled_loss and "is_ratio_clip" in self.ppo.model_fields_set:
            yield "ppo.is_ratio_clip has no effect without ppo.use_decoupled_loss"

    def _clip_warnings(self) -> Iterator[str]:
        """Bounds of a ratio that is 1 for every token, as far as they were written down."""
        if not self.ppo.use_decoupled_loss or self._proximal_may_differ or ":" in self.ppo.loss:
            return
        bounds = ("eps_clip", "eps_clip_high", "c_clip", "early_stop_imp_ratio")
        for name in bounds:
            if name in self.ppo.model_fields_set and getattr(self.ppo, name) is not None:
                yield (
                    f"ppo.{name} cannot act: the ratio that it bounds is 1 for every token while a step makes one "
                    "update; ppo.n_minibatches or ppo.sample_reuse above 1 let it act"
                )
