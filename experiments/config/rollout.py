"""Rollouts: sampling, the staleness bound, agents and rewards."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)

from corral.experiments.config.base import FrozenConfig
from corral.experiments.config.endpoint import TRIAL, JudgeConfig, TeacherEndpointConfig, checked_teacher_names
from corral.experiments.config.environment import EnvironmentConfig
from corral.scheduling.errors import RuleError

EXACT_MATCH = "corral.workers.rewards:exact_match"
"""Import path of the reward that compares with the row's answer."""
NO_REWARD = "corral.workers.rewards:no_reward"
"""Import path of the one that judges nothing, where a teacher alone is learned from."""

SINGLE_TURN = "corral.agents:single_turn"
"""Import path of the agent that answers once: rollout workers do what it says themselves."""

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_import_path_syntax(text: str) -> str:
    """The text; ValueError if it cannot be `package.module:name`."""
    if not _IMPORT_PATH.fullmatch(text):
        remedy = "put a colon before the function's name"
        if "/" in text or ".py" in text:
            remedy = (
                "name the module without its folder and without .py, as in my_reward:score, and run rl-submit there"
            )
        raise RuleError("must look like package.module:name", remedy)
    return text


ImportPath = Annotated[str, AfterValidator(check_import_path_syntax)]
"""`package.module:name` of a function or class."""

_NOTES_BYTES = 256  # of an episode: what an agent notes are a few numbers by name
_PART_NAME = re.compile(r"[A-Za-z_][\w-]*")


class RewardPart(FrozenConfig):
    """One of the rewards that an answer's is the weighted sum of."""

    function: ImportPath
    """A function (problem, answer text) -> float, or of a group, (problem, answers) or (problem, episodes) -> list of floats, async or not; or a class whose instances are called so. See docs/rewards.md."""  # noqa: E501
    weight: float = 1.0
    """Factor of its number in the reward; 0.0 only measures it."""
    settings: dict[str, Any] = {}
    """Fields of the class, by name."""
    concurrency: int | None = Field(default=None, ge=1)
    """Calls at a time, in each rollout worker. Each call of a plain function has a process to itself, calls of an async one share a process. None: as many as the worker has CPUs, but 4 to 16, of a plain function, and 256 of an async one."""  # noqa: E501
    words: int = Field(default=0, ge=0, le=8192)
    """Bytes of what it says in words that go with each answer to the trainer, for people to read; of more the last ones. 0: none."""  # noqa: E501

    @model_validator(mode="after")
    def _has_fields(self) -> Self:
        if self.function == EXACT_MATCH and self.settings:
            raise RuleError("exact_match has no settings", "remove them")
        return self


def reward_parts(value: Any) -> Any:
    """The parts by name; an import path is the mapping of one, under the name behind its colon.

    Raises:
        ValueError: if it is no import path, or no mapping of names that a metric can have.
    """
    if isinstance(value, str):
        return {check_import_path_syntax(value).partition(":")[2]: RewardPart(function=value)}
    if isinstance(value, Mapping):
        if not value:
            raise RuleError("must have a part", "name a function, such as {right: {function: my_rewards:score}}")
        for name in value:
            if not _PART_NAME.fullmatch(str(name)):
                raise RuleError(f"a part's name is letters, digits, underscores and dashes, got {name!r}", "rename it")
        return {name: {"function": part} if isinstance(part, str) else part for name, part in value.items()}
    return value


def functions_of(parts: Mapping[str, RewardPart]) -> str:
    """Their import paths, for people."""
    return ", ".join(dict.fromkeys(part.function for part in parts.values()))


def reported_parts(parts: Mapping[str, RewardPart]) -> tuple[str, ...]:
    """The names of those that each answer says the numbers of: all, where there are several."""
    return tuple(parts) if len(parts) > 1 else ()


def remarks_size(parts: Mapping[str, RewardPart], *, of_episodes: bool = False) -> int:
    """Bytes for what is said of an answer in words: by each of these parts, and by the agent of an episode."""
    of_parts = (len(part_remark(name, "")) + part.words + 1 for name, part in parts.items() if part.words)
    return sum(of_parts) + (_NOTES_BYTES if of_episodes else 0)


def part_remark(name: str, said: str) -> str:
    """The remark of a part, as people read it."""
    return f"{name}: {said}"


def _as_written(parts: dict[str, RewardPart]) -> Any:
    """The import path alone, where nothing else was said."""
    first = next(iter(parts.values()))
    if parts == reward_parts(first.function):
        return first.function
    return {name: part.model_dump() for name, part in parts.items()}


DEFAULT_REWARD: Any = EXACT_MATCH
"""Read as what users write is."""

RewardParts = Annotated[dict[str, RewardPart], BeforeValidator(reward_parts), PlainSerializer(_as_written)]

_PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"}


class SamplingConfig(FrozenConfig):
    """How one answer is sampled."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer in tokens."""
    temperature: float = Field(default=1.0, gt=0.0, le=100.0)
    """Divides the logits, in generation and in the training loss alike. Rows may say another (dataset.columns)."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Fraction of the probability mass that is sampled from; 1.0 is all."""
    top_k: int = Field(default=-1, ge=-1)
    """Number of most likely tokens that are sampled from; -1 is all."""

    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Tokens that are less than this many times as likely as the likeliest are not sampled; 0.0 samples from all."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end an answer: the token that completes one is its last."""

    @model_validator(mode="before")
    @classmethod
    def _samples_from_the_model(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (written := _PENALTIES & data.keys()):
            raise RuleError(
                f"{', '.join(sorted(written))} would change the generator's logits by what it has said, and not the "
                "trainer's, whose log-probabilities are compared with them",
                "penalise repetition in the reward",
            )
        return data

    @field_validator("top_k")
    @classmethod
    def _some_tokens_are_left(cls, value: int) -> int:
        if value == 0:
            raise RuleError("must be -1 (all tokens) or at least 1, got 0", "write -1 to sample from all tokens")
        return value


class RewardConfig(FrozenConfig):
    """The reward of answers. Without any setting: the exact match."""

    reward: RewardParts = DEFAULT_REWARD
    """The import path of a function (problem, answer text) -> float; or several by name, {right: {function: ..., weight: 1.0}}, whose weighted sum it is. See docs/rewards.md."""  # noqa: E501
    reward_timeout_s: float = Field(default=15.0, gt=0.0)
    """Deadline of one reward call, counted from when the function is called."""
    reward_retries: int = Field(default=2, ge=0)
    """Further tries of a failed reward or agent; then the prompt is dropped and counted, never given a reward of 0."""


class GenerationConfig(RewardConfig):
    """How answers are made and judged."""

    sampling: SamplingConfig = SamplingConfig()
    """How answers are sampled."""

    @property
    def asks_judge(self) -> bool:
        """Whether a part of the reward asks the trial's own judge."""
        return any(part.settings.get("url") == TRIAL for part in self.reward.values())

    @property
    def makes_episodes(self) -> bool:
        """Whether an answer may be an episode of several sequences, with rewards of turns: samples say of it then."""
        return False

    @property
    def served_teachers(self) -> Mapping[str, TeacherEndpointConfig]:
        """Teachers outside of the trial, by source; that of all rows has no name."""
        return {}

    @property
    def compares(self) -> bool:
        """Whether the reward needs the answer of each row."""
        return any(part.function == EXACT_MATCH for part in self.reward.values())


class EpisodeConfig(FrozenConfig):
    """Limits of one episode of an agent; at a limit nothing more is generated for it."""

    max_turns: int = Field(default=32, ge=1)
    """Answers of the model."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Of a sequence: everything that was given and made in it. None: what a micro-batch of each model, the actor's positions and the servers' cache can take."""  # noqa: E501
    can_replay: bool = False
    """Whether the agent or environment does the same whenever the model says the same: then its finished turns are kept in the trial's folder, and one that is begun again, since its worker or its process was lost, goes on behind them. Not with mixtures."""  # noqa: E501
    timeout_s: float | None = Field(default=None, gt=0.0)
    """Seconds from its start to the end of its last answer, waiting for servers included; None: no limit."""


def _with_max_staleness(schema: dict[str, Any]) -> None:
    schema["properties"]["max_staleness"] = {"type": "integer", "description": "max_head_offpolicyness"}


class RolloutConfig(GenerationConfig):
    """The asynchronous side of the trial."""

    model_config = ConfigDict(json_schema_extra=_with_max_staleness)

    max_head_offpolicyness: int = Field(default=1, ge=0, le=100)
    """Max staleness: no token that is trained on is more than this many policy versions old; 0 is synchronous. The key
    may be written `max_staleness`."""
    demonstrations: str | None = None
    """Field of rows with an answer that stands in the group for one of the policy's, and is judged as those are; rows without it, and answers that are too long, are as ever. Its tokens count as made with probability 1: see `ppo.algorithm: luffy` and `sft_mix`."""  # noqa: E501
    max_concurrent_rollouts: int | None = Field(default=None, ge=1)
    """Prompts in flight at a time over all rollout workers; None is the train batch size."""
    reorder_window: int | None = Field(default=None, ge=1)
    """How far a finished prompt may get ahead of older ones that are still being answered, counted in prompts: 1 trains strictly in their order, and with any window no answer is thrown away for having taken long. None: whatever is finished, and what is too old by its turn is answered anew. See docs/rollout.md."""  # noqa: E501
    spare_answers: int = Field(default=0, ge=0)
    """Answers asked for beyond `ppo.group_size`: the first `group_size` that end are kept, the others are cancelled; of an agent's or environment's episodes so many may fail, too. Long answers, and failing ones, become rarer in training than the policy makes them."""  # noqa: E501
    drop_uniform_groups: bool = False
    """Whether a prompt all of whose answers have the same reward is dropped, and counted as `filtered`: relative to each other they teach nothing."""  # noqa: E501
    teacher: TeacherEndpointConfig | None = None
    """A teacher outside of the trial, in place of the model `teacher`; answers are shown to it when they are judged."""
    teachers: Annotated[dict[str, TeacherEndpointConfig], AfterValidator(checked_teacher_names)] = {}
    """Such teachers by the source whose rows each judges; other sources have theirs in `teachers` of the trial."""
    agent: ImportPath = SINGLE_TURN
    """An async function (task, session) -> float, Outcome or None; see docs/agents.md."""
    agent_settings: dict[str, Any] = {}
    """Further arguments of the agent, by name, such as {max_turns: 3}."""
    agent_timeout_s: float = Field(default=300.0, gt=0.0)
    """How long an agent may wait at a time for something that is neither an answer nor a reward, and how long it may
    keep the event loop to itself; those have deadlines of their own."""
    agent_processes: int = Field(default=2, ge=1, le=4096)
    """Processes of each rollout worker that an agent of your own or an environment runs in, many episodes in each at a
    time."""
    episode: EpisodeConfig = EpisodeConfig()
    """Limits of an episode, where the agent is not the single turn."""
    judge: JudgeConfig | None = None
    """The trial's own judge, which a reward with the settings {url: trial} asks. See docs/rewards.md."""
    environment: EnvironmentConfig | None = None
    """An environment of a package, whose tasks are the prompts and which gives the rewards, in place of an agent."""

    @model_validator(mode="after")
    def _demonstrates_answers(self) -> Self:
        if self.demonstrations is not None and self.makes_episodes:
            raise RuleError("demonstrations are answers to prompts, and no episodes", "remove agent or environment")
        return self

    @property
    def served_teachers(self) -> Mapping[str, TeacherEndpointConfig]:
        return self.teachers if self.teacher is None else {"": self.teacher, **self.teachers}

    @property
    def makes_episodes(self) -> bool:
        return self.agent != SINGLE_TURN or self.environment is not None

    @property
    def overtaking(self) -> int:
        """Younger prompts that may be trained on before an older one, as far as that is bounded."""
        return 0 if self.reorder_window is None else self.reorder_window - 1


SGLANG_FLAGS_SET_HERE = frozenset(
    {
        "admin-api-key",
        "api-key",
        "config",
        "dtype",
        "enable-http2",
        "enable-http-worker-reuseport",
        "enable-return-routed-experts",
        "host",
        "incremental-streaming-output",
        "max-running-requests",
        "max-total-tokens",
        "model",
        "model-path",
        "port",
        "random-seed",
        "skip-server-warmup",
        "skip-tokenizer-init",
        "ssl-ca-certs",
        "ssl-certfile",
        "ssl-keyfile",
        "ssl-keyfile-password",
        "weight-version",
    }
)
"""Flags of SGLang that follow from the trial, or from another key of the configuration."""
_SGLANG_FLAGS_THAT_ROUND = {"kv-cache-dtype": "auto", "quantization": "unquant"}
"""Flags of SGLang by which its answers are no longer those of the weights that it is given, and what leaves them so."""
SGLANG_FLAGS_OF_PLACES = frozenset(
    {
        "base-gpu-id",
        "dist-init-addr",
        "gpu-id-step",
        "nccl-init-addr",
        "nnodes",
        "node-rank",
        "pipeline-parallel-size",
        "pp-size",
        "tensor-parallel-size",
        "tp-size",
    }
)
"""Flags of SGLang that say which GPUs of which nodes a server takes: the allocation does."""
_SGLANG_FLAGS_THAT_CANNOT_WORK = {
    **dict.fromkeys(
        ("disaggregation-", "encoder-only", "encoder-urls", "language-only"),
        "makes this server a part of one, and nothing here stands between the parts; each server answers by itself",
    ),
    **dict.fromkeys(
        ("grpc-mode", "smg-grpc-mode", "tokenizer-worker-num", "use-ray"),
        "starts other listeners than the one whose socket and certificate the server is given",
    ),
    **dict.fromkeys(("is-embedding", "prefill-only-disable-kv-cache"), "makes a server that generates nothing"),
    "checkpoint-engine-wait-weights-before-ready": "waits for weights from another program than the trainer",
    "delete-ckpt-after-loading": "removes weights that the trial needs again",
}
"""Flags of SGLang, or beginnings of several, that end here in a server that never serves, or harms; and why."""
_WHY_NOT: Final[Mapping[str, str]] = {
    **dict.fromkeys(SGLANG_FLAGS_SET_HERE, "is set by the trial or by another key of `engine`; remove it from flags"),
    **dict.fromkeys(
        SGLANG_FLAGS_OF_PLACES,
        "contradicts the allocation, which says where servers run and on how many GPUs; write sglang:d4t2 there for 4 "
        "servers of 2 GPUs on one node each",
    ),
    **{
        flag: f"cannot work here: it {reason}; remove it from flags"
        for flag, reason in _SGLANG_FLAGS_THAT_CANNOT_WORK.items()
    },
}
_FLAG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

FlagValue = bool | int | float | str | list[int | float | str]


class SglangConfig(FrozenConfig):
    """Servers of SGLang, each a process of its own, where the allocation names `sglang`."""

    python: Path | None = None
    """The Python that has SGLang installed; None is `.venv-sglang` beside corral's own environment (`make sglang`)."""
    flags: dict[str, FlagValue] = {}
    """More flags of SGLang's server, by name without the dashes in front: {mem-fraction-static: 0.8}. true is a flag without a value, false leaves it out, a list is several values."""  # noqa: E501

    @property
    def rounding_flags(self) -> list[str]:
        """The flags by which answers are those of rounded weights, or of rounded keys and values."""
        rounds = _SGLANG_FLAGS_THAT_ROUND.items()
        return [name for name, exact in rounds if self.flags.get(name, False) not in (False, exact)]

    @field_validator("flags")
    @classmethod
    def _flags_are_free(cls, value: dict[str, FlagValue]) -> dict[str, FlagValue]:
        for name in value:
            if not _FLAG.fullmatch(name):
                raise RuleError(f"{name!r} is no flag of SGLang", "write it as mem-fraction-static")
            for flag, reason in _WHY_NOT.items():
                # SGLang completes flags that are written in part.
                if flag.startswith(name) or (flag.endswith("-") and name.startswith(flag)):
                    raise ValueError(f"--{name} {reason}")
        return value


UpdateMode = Literal["retract", "abort", "in_place"]
"""What an update of the weights does to the answers under way, by SGLang's names."""


SPARE_STAGING_MB = 256
"""Of a host's memory, left free beside a version that is written there, for what all processes need until it is."""


WeightEncoding = Literal["whole", "delta", "lora"]
_WAYS: Final[Mapping[str, tuple[Literal["host", "hosts", "shared"], WeightEncoding]]] = {
    "shared_memory": ("host", "whole"),
    "broadcast": ("hosts", "whole"),
    "delta": ("host", "delta"),
    "lora": ("host", "lora"),
    "disk": ("shared", "whole"),
}
"""Where servers read a version (in their host's memory, which other hosts may fill, or on the shared file system), and
what is read of it where a version is held."""


class WeightsConfig(FrozenConfig):
    """How new weights get from the trainer to the generation servers."""

    transport: Literal["shared_memory", "broadcast", "delta", "lora", "disk"] = "shared_memory"
    """`shared_memory`: one worker of each host copies a version into the host's memory while the servers generate, and they read it there; `broadcast`: the same, but one or two hosts read it from the trial directory, and the others have it from hosts that hold it; `delta`: as `shared_memory`, but it reads only what changed since the version before, which pays where `actor.dtype` is bfloat16; `lora`: as `shared_memory`, but it reads only the adapter, with `actor.lora`; `disk`: each server reads it from the trial directory, twice, once standing still."""  # noqa: E501
    host_directory: Path = Field(default=Path("/dev/shm"), validate_default=False)  # as JSON it would be text
    """Where on each host all but `disk` keep at most two versions at a time, the present one and the next, in a folder of the trial's own; a version that does not fit is read as with `disk`."""  # noqa: E501
    update_mode: UpdateMode = "retract"
    """What happens to answers under way: `retract`: the new weights read them again and go on; `abort`: they come back as they are, and are asked for again, from any server; `in_place`: they go on with the keys and values of the old weights, with the embedded engine only."""  # noqa: E501

    update_timeout_s: float = Field(default=300.0, gt=0.0)
    """Deadline for a host to have a version, and again for a server to read it there."""

    @property
    def place(self) -> Literal["host", "hosts", "shared"]:
        """Where servers read a version."""
        return _WAYS[self.transport][0]

    @property
    def encoding(self) -> WeightEncoding:
        """What is read of it where a version is held already."""
        return _WAYS[self.transport][1]

    @field_validator("host_directory")
    @classmethod
    def _is_absolute(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise RuleError(
                f"must be the same place on every host, got the relative path {str(value)!r}", "begin it with /"
            )
        return value


class EngineConfig(FrozenConfig):
    """The generation engine."""

    max_running_requests: int = Field(default=64, ge=1)
    """Sequences decoded at a time in one server."""
    max_total_tokens: int | None = Field(default=65536, ge=64)
    """Tokens that the KV cache of one server holds; null lets SGLang take what its weights leave of the GPU (`sglang.flags: {mem-fraction-static: ...}`), which the memory plan then does not know."""  # noqa: E501
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and of the KV cache in the server."""
    quantization: Literal["int8"] | None = None
    """int8 makes the embedded engine answer by rounded weights; the trainer's stay as they are. See docs/rollout.md."""
