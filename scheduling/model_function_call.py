"""Model function calls: what one model does in every step, which keys it reads and makes, what goes before and after.

pre hooks ──► input keys ──► implementation on the model, micro-batch by micro-batch ──► output keys ──► post hooks
                                        or statistics, of a call that trains or evaluates ─┘
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from corral.scheduling.frozen import FrozenModel
from corral.scheduling.mesh import Mesh
from corral.scheduling.packing import MicroBatchSpec

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} must consist of letters, digits and _, not starting with a digit")


class CallType(StrEnum):
    """What a call asks a model to do."""

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


@dataclass(frozen=True, slots=True, order=True)
class ModelShardID:
    """The part of a model that one rank holds."""

    model_name: ModelName
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int = 0

    def __str__(self) -> str:
        context = f"c{self.cp_rank}" if self.cp_rank else ""
        return f"{self.model_name}@d{self.dp_rank}t{self.tp_rank}p{self.pp_rank}{context}"


def shard_ids(model_name: ModelName, mesh: Mesh) -> dict[ModelShardID, int]:
    """The rank that holds each shard of a model."""
    return {ModelShardID(model_name, *mesh.coords(rank)): rank for rank in mesh.ranks}


class PullWeightsHook(FrozenModel):
    """Before a call: its model takes over the parameters of another one (parameter reallocation).

    For a replica that generates with what the trained model has become.
    """

    type: Literal["pull_weights"] = "pull_weights"
    source: ModelName
    """Whose parameters; of the same architecture, in whatever layout and place."""

    @field_validator("source", mode="before")
    @classmethod
    def _role_is_replica_zero(cls, value: Any) -> Any:
        return ModelName(value) if isinstance(value, str) else value


class PushWeightsHook(FrozenModel):
    """After a train step that changed the weights: another model takes them over, wholly or as a moving average."""

    type: Literal["push_weights"] = "push_weights"
    target: ModelName
    """Who takes them; of the same architecture, in whatever layout and place."""
    eta: float = Field(default=1.0, gt=0.0, le=1.0)
    """target = eta * source + (1 - eta) * target: 1 is a copy, less is an exponential moving average (a reference)."""

    @field_validator("target", mode="before")
    @classmethod
    def _role_is_replica_zero(cls, value: Any) -> Any:
        return ModelName(value) if isinstance(value, str) else value


class PublishWeightsHook(FrozenModel):
    """After a train step that changed the weights: hand them to the generation servers as the new policy version."""

    type: Literal["publish_weights"] = "publish_weights"


class OffloadHook(FrozenModel):
    """After a call: move the model's parameters to host memory until it is called again."""

    type: Literal["offload"] = "offload"


PreHook = PullWeightsHook
PostHook = Annotated[PublishWeightsHook | PushWeightsHook | OffloadHook, Field(discriminator="type")]
_AFTER_TRAINING = (PublishWeightsHook, PushWeightsHook)


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
    model_name: ModelName
    """Whose model runs it; a plain string is replica 0 of that role."""
    call_type: CallType
    implementation: str
    """The interface that implements it: a built-in name ("ppo_actor") or an import path."""
    n_seqs: int = Field(ge=1)
    """Samples (prompts with all of their answers) that it takes at a time; a batch of more is taken in several goes,
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
    """How a rank's share of the samples is cut for the forward pass."""
    pre_hooks: tuple[PreHook, ...] = ()
    post_hooks: tuple[PostHook, ...] = ()

    @field_validator("model_name", mode="before")
    @classmethod
    def _role_is_replica_zero(cls, value: Any) -> Any:
        return ModelName(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _keys_agree(self) -> "ModelFunctionCall":
        _check_name("call name", self.name)
        for field, keys in (("input_keys", self.input_keys), ("output_keys", self.output_keys)):
            if repeated := sorted({key for key in keys if keys.count(key) > 1}):
                raise ValueError(f"call {self.name!r} names {', '.join(repeated)} more than once in {field}")
        _check_remap(self.name, "input_key_remap", self.input_key_remap, self.input_key_remap.keys(), self.input_keys)
        _check_remap(
            self.name, "output_key_remap", self.output_key_remap, self.output_key_remap.values(), self.output_keys
        )
        return self

    @model_validator(mode="after")
    def _type_fits_the_rest(self) -> "ModelFunctionCall":
        trains = self.call_type is CallType.TRAIN_STEP
        if self.call_type in (CallType.GENERATE, CallType.INFERENCE) and not self.output_keys:
            raise ValueError(f"call {self.name!r} is of type {self.call_type.value} and must have output_keys")
        if self.call_type in (CallType.TRAIN_STEP, CallType.EVALUATE) and self.output_keys:
            raise ValueError(
                f"call {self.name!r} is of type {self.call_type.value}, which returns statistics and no keys; "
                f"remove output_keys {list(self.output_keys)}"
            )
        for hook in self.post_hooks:
            if isinstance(hook, _AFTER_TRAINING) and not trains:
                raise ValueError(
                    f"call {self.name!r}: hook {hook.type} follows a train_step only, not {self.call_type.value}"
                )
        return self

    @property
    def role(self) -> str:
        return self.model_name.role


MFCDef = ModelFunctionCall  # the reference system's name


def _check_remap(
    call: str, field: str, remap: Mapping[str, str], graph_names: Iterable[str], declared: Sequence[str]
) -> None:
    if unknown := sorted(set(graph_names) - set(declared)):
        raise ValueError(
            f"call {call!r}: {field} names {', '.join(unknown)}, which are not among its keys {list(declared)}"
        )
    if len(set(remap.values())) < len(remap):
        raise ValueError(f"call {call!r}: {field} gives two keys the same name: {dict(remap)}")
