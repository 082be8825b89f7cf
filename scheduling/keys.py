"""Keys of samples: what each is called, how many values it has for one answer, and of what type.

    Key("margin", "per_answer", "float32")      in a file of the user's own, or in BUILT_IN_KEYS
        │ asked at submission in a process of its own: `corral.experiments.inputs.users_process`
        ▼
    the plan ──► master: what moves, and how many bytes it is
             └─► model workers: memory for what comes, micro-batches, padding

A declaration is data, so that the master knows the layout of a user's key without importing the user's code or torch.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from types import MappingProxyType

from corral.scheduling.errors import RuleError

DTYPES = MappingProxyType({"bool": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "float32": 4, "float64": 8})
"""Types that travel between processes as they are, and the bytes of a number."""


class KeyLayout(StrEnum):
    """How many values a key holds for one answer of S tokens, its prompt included."""

    PER_TOKEN = "per_token"  # S values
    PER_SHIFTED_TOKEN = "per_shifted_token"  # S - 1 values; value t belongs to the token at t + 1
    PER_ANSWER = "per_answer"  # 1 value

    def length(self, num_tokens: int) -> int:
        """Number of values for an answer of `num_tokens` tokens."""
        return self.lengths((num_tokens,))[0]

    def lengths(self, num_tokens: Sequence[int]) -> list[int]:
        """The same of several answers."""
        if self is KeyLayout.PER_TOKEN:
            return list(num_tokens)
        return [tokens - 1 for tokens in num_tokens] if self is KeyLayout.PER_SHIFTED_TOKEN else [1] * len(num_tokens)


@dataclass(frozen=True, slots=True, init=False)
class Key:
    """One key of a sample.

    Example:
        MARGIN = Key("margin", "per_answer", "float32")

    Raises:
        ValueError: if the name is no identifier, or layout or type is not one of those there are.
    """

    name: str
    layout: KeyLayout
    dtype: str
    """Name of numpy's type, one of `DTYPES`."""
    shape: tuple[int, ...]
    """Of what stands at each place that the layout counts, () for one number; its numbers lie one after the other."""

    def __init__(self, name: str, layout: str, dtype: str, shape: tuple[int, ...] = ()) -> None:
        if not name.isidentifier():
            raise RuleError(
                "a key's name consists of letters, digits and _, not starting with a digit", f"got {name!r}"
            )
        if layout not in list(KeyLayout):
            raise RuleError(f"key {name!r} has the layout {layout!r}", f"layouts are {', '.join(KeyLayout)}")
        if dtype not in DTYPES:
            raise RuleError(f"key {name!r} has the type {dtype!r}", f"types are {', '.join(DTYPES)}")
        if any(size < 1 for size in shape):
            raise RuleError(f"key {name!r} has the shape {shape}", "every size is at least 1")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "layout", KeyLayout(layout))
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", tuple(shape))

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return DTYPES[self.dtype]

    def length(self, num_tokens: int) -> int:
        """Numbers of an answer of so many tokens."""
        return self.lengths((num_tokens,))[0]

    def lengths(self, num_tokens: Sequence[int]) -> list[int]:
        """The same of several answers."""
        lengths = self.layout.lengths(num_tokens)
        return [length * prod(self.shape) for length in lengths] if self.shape else lengths


DeclaredKeys = Mapping[str, Key]

BUILT_IN_KEYS: DeclaredKeys = MappingProxyType(
    {
        key.name: key
        for key in (
            Key("input_ids", "per_token", "int32"),
            Key("prompt_mask", "per_token", "bool"),  # True on tokens that were given: the prompt, tools' outputs
            Key("old_logprobs", "per_shifted_token", "float32"),  # of the behaviour policy; 0 on given tokens
            Key("versions", "per_shifted_token", "int32"),  # policy version that made the token; -1 on given tokens
            Key("logprobs", "per_shifted_token", "float32"),  # an inference call's output, before it is renamed
            Key("proximal_logprobs", "per_shifted_token", "float32"),
            Key("ref_logprobs", "per_shifted_token", "float32"),
            Key("teacher_logprobs", "per_shifted_token", "float32"),  # of the sampled tokens, by a better model
            Key("advantages", "per_shifted_token", "float32"),
            Key("behaviour_weights", "per_shifted_token", "float32"),
            Key("loss_weights", "per_shifted_token", "float32"),  # of a token in the mean over all tokens
            Key("loss_mask", "per_shifted_token", "bool"),  # True on the tokens that are trained on
            Key("values", "per_token", "float32"),  # a critic's, in units of reward
            Key("returns", "per_shifted_token", "float32"),
            Key("rewards", "per_answer", "float32"),  # an episode's outcome stands on each of its sequences
            Key("episodes", "per_answer", "int32"),  # which episode of its group a sequence is of, from 0
            Key("turn_rewards", "per_shifted_token", "float32"),  # at a turn's last made token, 0 elsewhere
            Key("episode_tokens", "per_answer", "int32"),  # in the loss mask, of all sequences of the episode
            Key("counts_episode", "per_answer", "bool"),  # True on the one sequence of an episode that counts it
            Key("is_chosen", "per_answer", "bool"),  # True where the answer is the preferred one of a pair
            Key("seq_no_eos_mask", "per_answer", "bool"),  # True where the answer was cut off by the token limit
            Key("temperatures", "per_answer", "float32"),  # that it was sampled with; a group has one
        )
    }
)


EPISODES, TURN_REWARDS = "episodes", "turn_rewards"
EPISODE_KEYS = (EPISODES, TURN_REWARDS)
"""What samples carry besides where an answer may be an episode of several sequences. Those of one episode lie next to
each other, and in the order in which they were begun. Without these keys each sequence is an episode."""

TEMPERATURES = "temperatures"
"""What samples carry besides where rows of the dataset may say at which temperature their answers are sampled.
Without it that is the trial's."""

ROUTED_EXPERTS = "routed_experts"


def routed_experts_key(*, num_layers: int, top_k: int) -> Key:
    """The experts of each token of a mixture: by its layers with experts, in order, the `top_k` experts of the layer.

    -1 stands where the generator did not say, and has the trainer choose; so it does for the last token of an answer,
    which no generator has read. The rows are those of the weights that made the token after.
    """
    return Key(ROUTED_EXPERTS, "per_token", "int16", (num_layers, top_k))


REWARD_PARTS = "reward_parts"


def reward_parts_key(num_parts: int) -> Key:
    """The number of each part of the reward for an answer, for people: nothing is computed from it. NaN: no number."""
    return Key(REWARD_PARTS, "per_answer", "float32", (num_parts,))


REMARKS = "remarks"


def remarks_key(size_bytes: int) -> Key:
    """Remarks on an answer, for people: UTF-8, with zeros behind it."""
    return Key(REMARKS, "per_answer", "uint8", (size_bytes,))


FOR_PEOPLE = (REWARD_PARTS, REMARKS)
"""Keys that nothing is computed from."""

TEACHER_TOPK_IDS, TEACHER_TOPK_LOGPROBS = "teacher_topk_ids", "teacher_topk_logprobs"


def teacher_keys(top_k: int | None) -> tuple[Key, ...]:
    """A teacher's keys of a token: its log-probability; or the likeliest tokens in its place, with theirs."""
    if top_k is None:
        return built_in("teacher_logprobs")
    return (
        Key(TEACHER_TOPK_IDS, "per_shifted_token", "int32", (top_k,)),
        Key(TEACHER_TOPK_LOGPROBS, "per_shifted_token", "float32", (top_k,)),
    )


def keys_of_teachers(sources: Sequence[str], top_k: int | None) -> tuple[Key, ...]:
    """What the policy reads of teachers: of the one, or of those of these sources of rows."""
    keys = teacher_keys(top_k)
    return tuple(Key(f"{key.name}_{one}", key.layout, key.dtype, key.shape) for one in sources for key in keys) or keys


TEACHER_PROMPT = "teacher_prompt"


def teacher_prompt_key(num_tokens: int) -> Key:
    """What teachers read in the prompt's place: at most so many token ids, and -1 behind them."""
    return Key(TEACHER_PROMPT, "per_answer", "int32", (num_tokens,))


def built_in(*names: str) -> tuple[Key, ...]:
    """The built-in keys of these names.

    Raises:
        ValueError: naming one that is not built in, and the closest that is.
    """
    return tuple(find_declared(name, BUILT_IN_KEYS) for name in names)


def find_declared(name: str, table: DeclaredKeys) -> Key:
    """What a table says of a key; of one that was renamed, by its former name.

    Raises:
        ValueError: if it does not have it.
    """
    if name not in table:
        closest = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {closest[0]!r}?" if closest else f"declared are {', '.join(table)}"
        raise RuleError(f"unknown sample key {name!r}", hint)
    return table[name]


def merge_keys(declared: Iterable[Key]) -> DeclaredKeys:
    """All built-in keys and those declared besides, by name.

    Raises:
        ValueError: if one name is declared in two ways.
    """
    keys = dict(BUILT_IN_KEYS)
    for key in declared:
        other = keys.setdefault(key.name, key)
        if other != key:
            raise RuleError(
                f"key {key.name!r} is declared as {_form(key)} and as {_form(other)}", "give one of them another name"
            )
    return keys


def _form(key: Key) -> str:
    return f"{key.layout} {key.dtype}" + (f" {list(key.shape)}" if key.shape else "")
