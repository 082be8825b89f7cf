"""Model function calls: what one model does in every step, which keys it reads and makes, what goes before and after.

pre hooks ──► input keys ──► implementation on the model, micro-batch by micro-batch ──► output keys ──► post hooks
                                        or statistics, of a call that trains or evaluates ─┘
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from corral.scheduling.errors import RuleError
from corral.scheduling.frozen import FrozenModel
from corral.scheduling.packing import MicroBatchSpec

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} must consist of letters, digits and _, not starting with a digit")


class CallType(StrEnum):
    """The kinds of calls on a model."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True, order=True)
class ModelName:
    """One instance of a role's model; replicas of a role hold the same parameters in different layouts or places."""

    role: str
    replica_id: int = 0

    def __post_init__(self) -> None:
        _check_name("role", self.role)
        if self.replica_id < 0:
            raise ValueError(f"replica_id of role {self.role!r} must be 0 or more, got {self.replica_id}")

    def __str__(self) -> str:
        return f"{self.role}/{self.replica_id}"


def parse_model_name(text: str) -> ModelName:
    """Read what `str` writes: "actor/0"; "actor" is its replica 0."""
    role, _, replica_id = text.partition("/")
    return ModelName(role, int(replica_id or 0))


Model = Annotated[ModelName, BeforeValidator(lambda value: ModelName(value) if isinstance(value, str) else value)]
"""A plain string is replica 0 of that role."""


class PullWeightsHook(FrozenModel):
    """Before a call: its model takes over the parameters of another one (parameter reallocation).

    For a replica that generates with what the trained model has become.
    """

    type: Literal["pull_weights"] = "pull_weights"
    source: Model
    """The model that gives its parameters; of the same architecture, in any layout, on any ranks."""


class PushWeightsHook(FrozenModel):
    """After a train step that changed the weights: another model takes them over, wholly or as a moving average."""

    type: Literal["push_weights"] = "push_weights"
    target: Model
    """The model that takes them; of the same architecture, in any layout, on any ranks."""
    eta: float = Field(default=1.0, gt=0.0, le=1.0)
    """target = eta * source + (1 - eta) * target: 1 is a copy, less is an exponential moving average (a reference)."""


class PublishWeightsHook(FrozenModel):
    """After a train step that changed the weights: hand them to the generation servers as the new policy version."""

    type: Literal["publish_weights"] = "publish_weights"


class OffloadHook(FrozenModel):
    """After a call: move the model's parameters to host memory until it is called again."""

    type: Literal["offload"] = "offload"


PreHook = PullWeightsHook
PostHook = Annotated[PublishWeightsHook | PushWeightsHook | OffloadHook, Field(discriminator="type")]


class ModelFunctionCall(FrozenModel):
    """One thing that one model does in every step.

    Example:
        ModelFunctionCall(
            name="actor_inf", model_name="actor", call_type="inference", implementation="ppo_actor", n_seqs=64,
            input_keys=("input_ids",), output_keys=("proximal_logprobs",),
            output_key_remap={"logprobs": "proximal_logprobs"},
        )
    """

    name: str
    """Unique in the graph."""
    model_name: Model
    """The model that runs it; a plain string is replica 0 of that role."""
    call_type: CallType
    implementation: str
    """The interface that implements it: a built-in name ("ppo_actor") or an import path."""
    n_seqs: int = Field(ge=1)
    """Samples (prompts with all of their answers) that it takes at a time; a batch of more is taken in several slices,
    each as soon as that many have the call's input keys."""
    input_keys: tuple[str, ...] = ()
    """Keys that it reads, as the graph calls them."""
    output_keys: tuple[str, ...] = ()
    """Keys that it makes, as the graph calls them."""
    input_key_remap: dict[str, str] = Field(default_factory=dict)
    """The interface's own name by the graph's name, for the input keys whose names differ."""
    output_key_remap: dict[str, str] = Field(default_factory=dict)
    """The graph's name by the interface's own name, for the output keys whose names differ."""
    micro_batches: MicroBatchSpec = MicroBatchSpec()
    """How a rank's shard of the samples is cut for the forward pass."""
    pre_hooks: tuple[PreHook, ...] = ()
    post_hooks: tuple[PostHook, ...] = ()

    @model_validator(mode="after")
    def _keys_agree(self) -> "ModelFunctionCall":
        _check_name("call name", self.name)
        remaps = {"input": self.input_key_remap, "output": self.output_key_remap}
        names = {"input": set(self.input_key_remap), "output": set(self.output_key_remap.values())}
        for side, keys in (("input", self.input_keys), ("output", self.output_keys)):
            if repeated := sorted({key for key in keys if keys.count(key) > 1}):
                raise ValueError(f"call {self.name!r} names {', '.join(repeated)} more than once in {side}_keys")
            if unknown := sorted(names[side] - set(keys)):
                raise ValueError(
                    f"call {self.name!r}: {side}_key_remap names {', '.join(unknown)}, which are not among its keys "
                    f"{list(keys)}"
                )
            if len(set(remaps[side].values())) < len(remaps[side]):
                raise ValueError(f"call {self.name!r}: {side}_key_remap gives two keys the same name: {remaps[side]}")
        return self

    @model_validator(mode="after")
    def _type_fits_the_rest(self) -> "ModelFunctionCall":
        makes_keys = self.call_type in (CallType.GENERATE, CallType.INFERENCE)
        if makes_keys and not self.output_keys:
            raise ValueError(f"call {self.name!r} is of type {self.call_type.value} and must have output_keys")
        if self.output_keys and not makes_keys:
            raise RuleError(
                f"call {self.name!r} is of type {self.call_type.value}, which returns statistics and no keys",
                f"remove output_keys {list(self.output_keys)}",
            )
        for hook in self.post_hooks:
            if self.call_type is not CallType.TRAIN_STEP and not isinstance(hook, OffloadHook):
                raise ValueError(
                    f"call {self.name!r}: hook {hook.type} follows a train_step only, not {self.call_type.value}"
                )
        return self

    @property
    def role(self) -> str:
        return self.model_name.role


MFCDef = ModelFunctionCall  # the reference system's name
