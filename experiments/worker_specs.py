"""The specification of each worker of a trial: complete and typed, one per process, kept in plan.json."""

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from corral.experiments.config.algorithm import CriticConfig, DPOConfig, PPOConfig
from corral.experiments.config.base import FrozenConfig
from corral.experiments.config.control import TrainControl
from corral.experiments.config.data import DatasetConfig, EvaluationConfig, RowKind
from corral.experiments.config.model import GradientSums, LoraConfig, ModelConfig, OptimizerConfig, Recompute
from corral.experiments.config.rollout import (
    EngineConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    SglangConfig,
    WeightsConfig,
)
from corral.scheduling.cadence import Frequency
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.keys import Key, routed_experts_key
from corral.scheduling.model_function_call import ModelFunctionCall, ModelName, parse_model_name
from corral.scheduling.packing import TransformerShape
from corral.scheduling.parallel import Mesh
from corral.scheduling.policy_version import INITIAL_VERSION
from corral.scheduling.step_plan import StepPlan

TOKEN_TIMEOUT_S = 300.0
"""Longest time that a generation server which reads no weights may bring no token of an answer."""
Head = Literal["lm", "value", "scalar"]
"""What a model makes of tokens: a language model's logits, a value each, or one score of the whole answer."""


class SourceSpec(FrozenConfig):
    """A source of rows as it was at submission."""

    files: tuple[Path, ...]
    """Where its rows are, in their order."""
    num_rows: int = Field(ge=1)
    """Those that are used."""
    too_long: str = ""
    """Numbers of others, from 1, as in 3-5,9: they are longer than a prompt or a row may be, and left out."""
    sha256: str
    """By which workers know that it has not changed; see `fingerprint`."""


class DatasetSpec(FrozenConfig):
    """A dataset that was looked at at submission."""

    config: DatasetConfig
    """Where it is and how its rows are named."""
    row_kind: RowKind
    """What a sample is made of."""
    sources: dict[str, SourceSpec]
    """By name; that of the only one is empty."""

    @property
    def num_rows(self) -> int:
        """Rows of all sources that are used."""
        return sum(one.num_rows for one in self.sources.values())

    @property
    def sha256(self) -> str:
        """Of all sources together."""
        digests = [one.sha256 for one in self.sources.values()]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


class ParameterCounts(FrozenConfig):
    """How many numbers a model has."""

    trained: int = Field(ge=0)
    """Those that its optimizer changes."""
    frozen: int = Field(ge=0)
    """Those that stay as they are."""


class ModelRoleSpec(FrozenConfig):
    """One model that a model worker holds a part of."""

    role: str
    """actor, critic, ref, teacher or reward; teacher_math where rows of the source math have a teacher of their own."""
    replica_id: int = Field(default=0, ge=0)
    """Which of the role's models: replicas hold the same parameters in another layout or place."""
    model: ModelConfig
    """Its weights."""
    backend: Literal["fsdp", "megatron"] = "fsdp"
    """What holds and trains it."""
    head: Head = "lm"
    """What it makes of tokens."""
    optimizer: OptimizerConfig | None = None
    """None for a model that is only read."""
    lora: LoraConfig | None = None
    """Adapters, where they are trained in place of the weights."""
    recompute: Recompute = "none"
    """What its layers compute again in the backward pass."""
    gradient_sums: GradientSums = "each_micro_batch"
    """When its ranks add their gradients up."""
    is_averaged: bool = False
    """Whether it moves towards another model by less than a number of its `dtype` can tell."""
    num_parameters: ParameterCounts | None = None
    """As the files of the model say; None where they do not."""
    ppo: PPOConfig | None = None
    """Settings of `ppo_actor` and `ppo_critic`."""
    critic: CriticConfig = CriticConfig()
    """Settings of `ppo_critic`."""
    dpo: DPOConfig = DPOConfig()
    """Settings of `dpo`."""
    taught_sources: tuple[str, ...] = ()
    """Sources of rows that have teachers of their own: of the actor all, of such a teacher its own."""

    @property
    def model_name(self) -> ModelName:
        return ModelName(self.role, self.replica_id)

    @property
    def is_held_low(self) -> bool:
        """Whether what products alone read is held in their type, and not in float32."""
        return self.optimizer is None and not self.is_averaged


class BehaviourSpec(FrozenConfig):
    """Who makes the answers that are trained on: what the log-probabilities that come with them are those of."""

    sampling: SamplingConfig = SamplingConfig()
    """How answers are sampled."""
    has_row_temperatures: bool = False
    """Whether rows of the dataset may say another temperature; samples then carry that of each answer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the generator's matrix products."""
    rounded_by: tuple[str, ...] = ()
    """Settings by which it computes with rounded weights or caches."""
    keeps_cache: bool = False
    """Whether answers under way keep the keys and values of the weights before, when these change."""

    keeps_experts: bool = False
    """Whether an answer that newer weights continue is trained on with the experts that older ones chose for its first
    tokens, where the generator has read these again by the newer ones."""
    routes_anew: bool = False
    """Whether the trainer of a mixture chooses the experts of each token again, and does not replay its choice."""

    @property
    def is_exact(self) -> bool:
        """Whether each token's log-probability is that of its version's weights, but for the last bits."""
        return self.dtype == "float32" and not (self.rounded_by or self.keeps_cache or self.keeps_experts)


class RoutedExpertsSpec(FrozenConfig):
    """What generators say of the experts of a mixture, and samples carry of it; see `routed_experts_key`."""

    num_layers: int = Field(ge=1)
    """Layers of the model; generators name experts for all of them."""
    expert_layers: tuple[int, ...] = Field(min_length=1)
    """Those that are mixtures."""
    num_experts: int = Field(ge=1)
    """Of each mixture."""
    top_k: int = Field(ge=1)
    """Experts of a token in each mixture."""

    @property
    def key(self) -> Key:
        """How samples carry it."""
        return routed_experts_key(num_layers=len(self.expert_layers), top_k=self.top_k)


class GenerationSpec(FrozenConfig):
    """How a model worker answers prompts, where `generate` is a call of the graph."""

    sampling: SamplingConfig
    """How answers are sampled."""
    group_size: int = Field(ge=1)
    """Answers to one prompt."""
    max_running_requests: int = Field(ge=1)
    """Answers that one data-parallel rank decodes at a time."""
    teacher_prompt_tokens: int = 0
    """Longest prompt of teachers' own that samples carry; 0: they carry none."""
    experts: RoutedExpertsSpec | None = None
    """The experts that samples carry; None where they carry none."""


class MasterWorkerSpec(FrozenConfig):
    """The one process that knows where every sample stands and says what runs next."""

    kind: Literal["master_worker"] = "master_worker"
    index: int = 0
    calls: list[ModelFunctionCall]
    """The dataflow graph's nodes."""
    train_batch_size: int = Field(ge=1)
    """Prompts (or rows, for SFT) that one train step consumes."""
    num_prompts: int = Field(ge=1)
    """Rows of the dataset: prompts of one pass."""
    source: Literal["dataset", "prompts", "trajectories"]
    """Whether model workers read samples from rows, make them from prompts, or get them from rollout workers."""
    max_head_offpolicyness: int = Field(ge=0)
    """Eta."""
    control: TrainControl
    """Length of the run and its commits."""
    initial_weights: dict[str, Path]
    """Weights of version 0 of every role that is trained."""
    published_role: str
    """The one of them whose weights are published: servers answer with them, and exports are copies of them."""
    writes_deltas: bool = False
    """Whether each published version says beside its files what has changed since the one before."""
    writes_first_version: bool = False
    """Whether version 0 is written and published as all others are, since no directory has it: the published role
    starts from an adapter as well."""
    shape_by_role: dict[str, TransformerShape] = {}
    """Sizes of each role's model, by which work is balanced; a model whose config.json does not say them is missing."""
    declared_keys: tuple[Key, ...] = ()
    """Keys of samples that are not built in: users' own, and those that a call renames."""
    meshes: dict[str, Mesh]
    """The ranks of each model, by its name ("actor/0"); every training rank is in one of them."""
    sample_ranks: list[int] = Field(min_length=1)
    """The ranks where samples come in: those that read rows, or take what rollout workers send."""
    evaluate_every: Frequency = Frequency()
    """When the calls that evaluate are due, besides before the first step and after the last."""

    @property
    def total_steps(self) -> int:
        """Train steps of the whole run."""
        return self.control.total_steps(num_rows=self.num_prompts, batch_size=self.train_batch_size)

    @property
    def num_model_workers(self) -> int:
        """Training ranks."""
        return 1 + max(rank for mesh in self.meshes.values() for rank in mesh.ranks)

    def mesh(self, model_name: ModelName) -> Mesh:
        """The ranks of a model."""
        return self.meshes[str(model_name)]

    @property
    def samples_from(self) -> str:
        """Where samples come from, in words."""
        return "rollout workers" if self.source == "trajectories" else "dataset"

    @property
    def weights_go_to(self) -> str:
        """Who takes published weights, in words."""
        return "generation servers" if self.source == "trajectories" else "trial folder"

    @property
    def sample_unit(self) -> str:
        """What a sample is, in words."""
        return "rows" if self.source == "dataset" else "prompts"

    @property
    def step_plan(self) -> StepPlan:
        """What a train step does where."""
        return StepPlan(
            graph=build_dataflow(self.calls),
            meshes={parse_model_name(name): mesh for name, mesh in self.meshes.items()},
            sample_ranks=tuple(self.sample_ranks),
            batch_size=self.train_batch_size,
        )


class ModelWorkerSpec(FrozenConfig):
    """One training rank."""

    kind: Literal["model_worker"] = "model_worker"
    index: int = Field(ge=0)
    """Global rank."""
    world_size: int = Field(ge=1)
    """Training ranks of all meshes."""
    roles: list[ModelRoleSpec]
    """Models that this rank holds a part of."""
    calls: list[ModelFunctionCall]
    """The dataflow graph's nodes."""
    declared_keys: tuple[Key, ...] = ()
    """Keys of samples that are not built in: users' own, and those that a call renames."""
    tokenizer: Path
    """Directory with the tokenizer of the samples."""
    takes_samples: bool
    """Whether samples come in at this rank."""
    dataset: DatasetSpec | None
    """The rows of a dataset source; None where samples arrive from rollout workers."""
    generation: GenerationSpec | None = None
    """How answers are sampled, where a call of the graph generates."""
    evaluation: EvaluationConfig | None
    """Held-out problems; generation servers answer them where there are any."""
    held_out: DatasetSpec | None = None
    """The rows of calls that evaluate on rows; None where there is no such call."""
    reward: RewardConfig = RewardConfig()
    """Who judges held-out answers."""
    behaviour: BehaviourSpec = BehaviourSpec()
    """Who makes the answers that are trained on."""
    samples_per_step: int | None = 0
    """Prompts of each train step whose answers are kept for reading; None keeps all."""
    total_steps: int = Field(ge=1)
    """Train steps of the whole run, for the learning-rate schedule."""


class GenerationServerSpec(FrozenConfig):
    """One server that answers /generate."""

    kind: Literal["generation_server"] = "generation_server"
    index: int = Field(ge=0)
    backend: Literal["hf", "sglang"] = "hf"
    """`hf` is the embedded engine, `sglang` a server of SGLang beside the worker."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of its own that share each layer; where it has none, processes that do."""
    initial_weights: Path
    """Weights that it starts with."""
    initial_version: str = str(INITIAL_VERSION)
    """Tag of these weights; one that no version has makes it take over the present version before it answers."""
    engine: EngineConfig
    """Sizes of the engine."""
    sglang: SglangConfig = SglangConfig()
    """How SGLang is started; `python` is never None where `backend` is `sglang`."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights get here."""
    is_judge: bool = False
    """Whether its weights are those of the trial's judge, and stay: rewards ask it, and nobody else."""
    records_experts: bool = False
    """Whether it is asked for the experts of each token."""
    memory_mb: dict[str, int] = {}
    """The least that it takes of its host's memory, in MB by what for; of the versions there, as if it wrote them."""


class HeldOutSpec(FrozenConfig):
    """Held-out problems that generation servers answer."""

    config: EvaluationConfig
    datasets: dict[str, DatasetSpec]
    """By name, as `EvaluationConfig.datasets` has it."""


class GserverManagerSpec(FrozenConfig):
    """Prompts, routing and weight updates."""

    kind: Literal["gserver_manager"] = "gserver_manager"
    index: int = 0
    dataset: DatasetSpec
    train_batch_size: int = Field(ge=1)
    total_train_epochs: int = Field(ge=1)
    rollout: RolloutConfig
    held_out: HeldOutSpec | None = None
    """What it deals when an evaluation is asked for; None where nothing is held out."""
    weights: WeightsConfig = WeightsConfig()


class EnvironmentSpec(FrozenConfig):
    """What an environment was at submission."""

    packages: dict[str, str]
    """Versions of what it is made of, by name."""
    sha256: str
    """Digest of its own source. With another source it may play otherwise, and a warning says so."""


class RolloutWorkerSpec(FrozenConfig):
    """One process that turns prompts into judged trajectories."""

    kind: Literal["rollout_worker"] = "rollout_worker"
    index: int = Field(ge=0)
    num_rollout_workers: int = Field(ge=1)
    dataset: DatasetSpec
    tokenizer: Path
    """Directory with tokenizer.json."""
    group_size: int = Field(ge=1)
    teacher_prompt_tokens: int = 0
    """Longest prompt of teachers' own that samples carry; 0: they carry none."""
    rollout: RolloutConfig
    token_timeout_s: float = TOKEN_TIMEOUT_S
    """A generation server that brings no token of an answer for so long is taken for hung; no less than it may take to
    read weights."""
    experts: RoutedExpertsSpec | None = None
    """The experts that samples carry; None where they carry none."""
    held_out: HeldOutSpec | None = None
    """What it answers besides, and trains nobody with; None where nothing is held out."""
    environment: EnvironmentSpec | None = None
    """What `rollout.environment` was when the trial was submitted; its `python` is never None then."""


WorkerSpec = Annotated[
    MasterWorkerSpec | ModelWorkerSpec | GenerationServerSpec | GserverManagerSpec | RolloutWorkerSpec,
    Field(discriminator="kind"),
]
