"""Models: where their weights come from, how ranks hold them, how they are updated."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from corral.experiments.config.algorithm import CriticConfig
from corral.experiments.config.base import FrozenConfig
from corral.experiments.config.rollout import ImportPath
from corral.scheduling.errors import RuleError
from corral.scheduling.packing import MicroBatchSpec

_NOT_ADAPTED = ("lm_head", "embed_tokens", "score")

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Recompute: TypeAlias = Literal["none", "selective", "full"]
"""What of a layer is computed again in the backward pass, in place of being kept."""
GradientSums: TypeAlias = Literal["each_micro_batch", "last_micro_batch"]
"""After which backward passes ranks add their gradients up."""
Offload: TypeAlias = Literal["none", "between_calls", "optimizer"]
"""What of a model lies in host memory, and when."""


class OptimizerConfig(FrozenConfig):
    """How gradients become updates, and the schedule of the learning rate."""

    type: Literal["adamw", "muon"] = "adamw"
    """`adamw` (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), or `muon`: Muon (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/) for the matrices of the layers, with updates about as large as AdamW's,
    and AdamW for embeddings, output, norms and biases."""
    lr: float = Field(default=2e-5, gt=0.0, le=1.0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.05, ge=0.0, le=10.0)
    """Decoupled weight decay of matrices and embeddings, per step and multiplied by the learning rate. Biases and the
    weights of norms do not decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first moment, and of the second."""
    eps: float = Field(default=1e-5, gt=0.0)
    """Added to the denominator of the update."""
    warmup_steps_proportion: float = Field(default=0.001, ge=0.0, lt=1.0)
    """Fraction of all train steps over which the learning rate rises linearly from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Where the schedule leads, as a fraction of `lr`: the rate of the step after the last; `constant` ignores it."""
    gradient_clipping: float = Field(default=1.0, gt=0.0)
    """Largest global gradient norm; larger gradients are scaled down to it."""


class ModelConfig(FrozenConfig):
    """One model on disk and how the training backend holds it."""

    path: Path
    """Directory in Hugging Face format: config.json, *.safetensors, tokenizer.json."""
    dtype: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Type of the matrix products, and of weights that are written and served; in memory what is trained is float32.
    `tf32` is float32 but for products on a GPU since Ampere, which round what they multiply to 10 bits after the point:
    several times as fast, and log-probabilities then differ from a generator's as coarsely as in bfloat16."""
    max_tokens_per_micro_batch: int = Field(default=16384, ge=16)
    """Token budget of one packed forward and backward pass; longer single sequences are an error."""
    shared_prompts: Literal["off", "auto"] = "off"
    """Whether what the answers of a prompt begin with is computed once for all of them that are in one micro-batch, and
    not for each: `auto` does so where it can, and the log of the workers says when it cannot (backend megatron, context
    parallel, sliding windows, dropout). The results are the same but for rounding; long prompts gain most
    (docs/layouts.md)."""
    offload: Offload = "none"
    """What lies in host memory: `between_calls` all of the model after each step's calls on it, to make room for others
    on the same ranks; `optimizer` what the optimizer of a trained model keeps, with AdamW 8 bytes for each parameter,
    which come to the device when its passes have let go of their activations, for the step alone (fsdp). The numbers
    are the same."""

    @property
    def micro_batches(self) -> MicroBatchSpec:
        """How what it computes is cut."""
        return MicroBatchSpec(
            max_tokens_per_micro_batch=self.max_tokens_per_micro_batch, shares_prompts=self.shared_prompts == "auto"
        )

    def weights_alone(self) -> "ModelConfig":
        """The settings of every model, without those that its role adds."""
        return ModelConfig(**{name: getattr(self, name) for name in ModelConfig.model_fields})


class LoraConfig(FrozenConfig):
    """Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685): W0 + alpha / rank * B A, where W0 stays."""

    rank: int = Field(ge=1, le=4096)
    """Rows of A and columns of B; each adapted layer of [out, in] has `rank * (in + out)` numbers that are trained."""
    alpha: float = Field(gt=0.0)
    """The product B A is multiplied by `alpha / rank`; often once or twice the rank."""
    targets: tuple[str, ...] | None = None
    """Linear layers that are adapted, by the end of their names (`[q_proj, v_proj]`, as peft's target_modules); None
    adapts all of them but the output."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Fraction of an adapted layer's input that its adapter does not see in a train step; PPO wants 0."""
    adapter: Path | None = None
    """Directory of an adapter in peft's format to start from (adapter_config.json, adapter_model.safetensors); None
    starts from `path` alone, with A at random and B zero."""

    @model_validator(mode="after")
    def _targets_name_layers(self) -> Self:
        if self.targets is None:
            return self
        if not self.targets or not all(self.targets):
            raise RuleError("targets names no layer, or one by an empty text", "null adapts all linear layers")
        for target in self.targets:
            if target.rpartition(".")[2] in _NOT_ADAPTED:
                raise RuleError(
                    f"targets names {target!r}, which is no linear layer within the model's layers",
                    "leave it out: embeddings and the output stay as they are, and a score layer is trained whole",
                )
        return self

    @property
    def scale(self) -> float:
        """The factor of the product B A."""
        return self.alpha / self.rank

    def adapts(self, layer: str) -> bool:
        """Whether a linear layer of this name, such as model.layers.0.self_attn.q_proj, is meant."""
        return self.targets is None or any(layer == end or layer.endswith(f".{end}") for end in self.targets)


class TrainedModelConfig(ModelConfig):
    """A model that is updated."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """How its weights are updated."""
    lora: LoraConfig | None = None
    """Trains adapters beside the weights, which stay as they are; None trains the weights."""
    recompute: Recompute = "none"
    """What its layers compute again in the backward pass of a train step, so that less memory is taken until then:
    `selective` keeps the results of matrix products and attention, and computes again what is cheap; `full` keeps the
    input of each layer only, and computes each twice, for a third more work. The numbers are the same."""

    gradient_sums: GradientSums = "each_micro_batch"
    """When ranks of the fsdp backend add their gradients up, of which each then keeps its shard: after each
    micro-batch, or after the last one of a step, which sends less, and takes whole float32 gradients until then: 4
    bytes for each trained parameter, divided by `t`. The megatron backend does the latter in any case."""

    @property
    def starts_as_stored(self) -> bool:
        """Whether training starts from the weights that `path` has; an adapter to start from makes others of them."""
        return self.lora is None or self.lora.adapter is None


class OwnInterface(FrozenConfig):
    """A model whose calls may run an interface of the user's own."""

    interface: ImportPath | None = None
    """Import path of an interface of your own that its calls run; None is the interface of its role."""

    role_interface: ClassVar[str]

    @property
    def implementation(self) -> str:
        """The interface of its calls, by name or import path."""
        return self.interface or self.role_interface


class ActorModelConfig(TrainedModelConfig, OwnInterface):
    """The policy."""

    role_interface: ClassVar[str] = "ppo_actor"


class CriticModelConfig(TrainedModelConfig, CriticConfig, OwnInterface):
    """The critic: a model that says what reward is to be expected, token by token."""

    role_interface: ClassVar[str] = "ppo_critic"

    @property
    def values(self) -> CriticConfig:
        """How its values are trained."""
        return CriticConfig(value_eps_clip=self.value_eps_clip, value_norm=self.value_norm)


class ReferenceModelConfig(ModelConfig):
    """The model that the policy is held near to."""

    ema: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of the policy in the reference after each train step (an exponential moving average, from `path` on).
    None leaves the reference as it is."""


class RewardModelConfig(ModelConfig, OwnInterface):
    """The model that rewards come from: by its score, or by an interface of your own."""

    role_interface: ClassVar[str] = "reward"
    head: Literal["scalar", "lm"] = "scalar"
    """The model's output: one score of the whole answer, or log-probabilities, for an interface of your own."""

    @model_validator(mode="after")
    def _reward_is_a_score(self) -> Self:
        if self.interface is None and self.head != "scalar":
            raise RuleError("head lm needs an interface of your own", "set head: scalar, whose score is the reward")
        return self
