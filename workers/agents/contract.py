"""What an agent gets and gives: data without behaviour, and without torch or any key of a trial.

    async def agent(task: Task, session: Session) -> float | Outcome | None

    float, Outcome.reward ──► the episode's reward          None ──► the trial's `rollout.reward` judges the last answer

Users import all of it from `corral.agents`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from corral.experiments.prompts.messages import Message as Message
from corral.experiments.prompts.tool_calls import ToolCall as ToolCall

Words = str | Sequence[Message] | Sequence[int]
"""What can be said to a model: text, messages of a conversation, or token ids as they are."""


@dataclass(frozen=True, slots=True)
class Task:
    """One episode's problem.

    Example:
        task["answer"]          # a field of the row
    """

    fields: Mapping[str, Any]
    """The row of the data set, as it stands in the file."""
    prompt: Words
    """As the row has it: text, messages, or token ids."""
    prompt_ids: Sequence[int]
    """The prompt's tokens, which the session's history begins with."""
    episode: int
    """Which one of the prompt's group, from 0; with `rollout.spare_answers` there may be more than are trained on."""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where programs that speak OpenAI's API find the model, in this episode."""

    base_url: str
    """http://127.0.0.1:PORT/v1"""
    api_key: str = field(repr=False)
    """Of this episode; it opens nothing when the episode is over."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model."""

    number: int
    """From 0, over all branches of the episode."""
    text: str
    """Without the token that ended it."""
    ids: Sequence[int]
    """With that token."""
    logprobs: Sequence[float]
    """Of each token, in nats, as it was sampled."""
    finish_reason: Literal["stop", "length"]
    """`length`: it was cut by a limit of tokens."""
    tool_calls: Sequence[ToolCall] = ()
    versions: Sequence[tuple[str, int, int]] = ()
    """Which weights made which of its tokens: version, first token, first token of others."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an episode."""

    reward: float | None
    """None leaves it to `rollout.reward`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for `metrics.jsonl`, where their means stand as `notes/NAME`, as those of `Session.note` do."""
    ended: str = ""
    """Why it ended early, in a word of one's own; "" if it did not. Counted as `episode/ended/WORD`."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode as a judge of groups sees it: what a reward gets a list of, whose second parameter is `episodes`."""

    turns: Sequence[str]
    """Texts of the model's answers, in the order in which they were begun."""
    notes: Mapping[str, float] = field(default_factory=dict)
    """What its agent has noted, or gave as `Outcome.metrics`."""
    ended: str = ""
    """Why it ended early: "length", "turns", "time", or a word of the agent's; "" if it did not."""
    reward: float | None = None
    """What its agent gave; None if it left that to the judge."""


class EpisodeEndedError(RuntimeError):
    """The episode has come to a limit of `rollout.episode`: nothing more is generated for it.

    An agent that does not catch it ends with it, and `rollout.reward` judges its last answer. One that gives rewards of
    its own catches it, and returns what the episode is worth as it stands.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        """length, turns, time or closed."""


class AsksOnError(BaseException):
    """An agent asks on and on in an episode that has ended. It is no Exception: what catches these catches it not."""


class JudgeError(RuntimeError):
    """`rollout.reward` failed on all of its tries: the episode cannot be judged."""


class RefusedError(RuntimeError):
    """Servers find fault with a request; none of them would ever answer it."""
