"""Session: how an agent speaks to the model; what it says, gets, rewards and notes of one episode.

    say ──► history of token ids ──generate──► Model ──Reply──► history, Turn
                │                                                 reward(turn=), note ──► Record ──► the worker
                └──branch──► another Session of the same episode, with a history of its own

A history only grows: the trainer learns from tokens as they were sampled, and never sees them cut into others. What
goes on from all tokens of a sequence stays in it; anything else is another sequence, in which all before it is given.

It knows neither HTTP nor the worker: `Model` is the interface, and a test of an agent may bring another model.
"""

import copy
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from corral.experiments.prompts.row_prompts import is_ids
from corral.experiments.prompts.tokens import answer_text, encode_answer, encode_prompt, is_longer, longest_text
from corral.workers.agents.contract import AsksOnError, Endpoint, EpisodeEndedError, Message, ToolCall, Turn, Words
from corral.workers.data.side_numbers import side_number

if TYPE_CHECKING:
    from corral.experiments.prompts.chat import ChatRenderer  # whose Jinja only the process of agents needs

_MAX_REFUSED = 64  # an agent may have so many branches that all end at once


# ModelLanguage: between words and the tokens of one model: text by its tokenizer, messages by its chat template.
#
# text ────► tokens as they are, behind the history
# messages ─► answered: what the template writes behind the answer ──► the history goes on
#              └── the template would now write what was said in another way ──► the conversation, rendered anew


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer."""

    number: int
    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    versions: Sequence[tuple[str, int, int]] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """Where a session may go on from."""

    history: Sequence[int]
    conversation: Sequence[Message] | None
    """The same as messages; None if nobody knows them."""
    last: Turn | None = None
    """The answer that it ends with."""


class ModelLanguage:
    """Of one model."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Collection[int],
        renderer: "ChatRenderer | None",
        max_tokens: int | None = None,
    ) -> None:
        """
        Args:
            max_tokens: of a sequence; None knows no limit.
            tokenizer: of `tokenizers`.
            stop_token_ids: a last token that is one of them is not part of an answer's text.
            renderer: None for a model without a chat template, to which messages cannot be said.
        """
        self._tokenizer, self._renderer = tokenizer, renderer
        self._longest_text = None if max_tokens is None else longest_text(tokenizer, max_tokens)
        self._stop_token_ids = frozenset((*stop_token_ids, *self.ends))

    def go_on(self, point: Point, words: Words, *, tools: Sequence[Mapping[str, Any]]) -> Point:
        """Behind some words; with another history where the model's template writes what was said in another way now.

        Text in the middle of a sequence has no special tokens.

        Raises:
            EpisodeEndedError: if the words are longer than a sequence; nobody makes tokens of them then.
            ValueError: for messages, if the model has no template, or nobody knows what was said before in messages.
        """
        if self._longest_text is not None and is_longer(words, self._longest_text):
            raise EpisodeEndedError("length", f"no sequence has room for more than {self._longest_text} characters")
        history, known = point.history, point.conversation
        if isinstance(words, str):
            ids = encode_answer(self._tokenizer, words) if history else encode_prompt(self._tokenizer, words)
            return Point([*history, *ids], None)
        if is_ids(words):
            return Point([*history, *words], None)
        messages = [word for word in words if isinstance(word, Mapping)]
        if self._renderer is None:
            raise ValueError("messages need a model with a chat template, and this one has none; say text")
        conversation = None if history and known is None else [*(known or ()), *messages]
        if point.last is not None:
            stopped = point.last.finish_reason == "stop"
            gone_on = self._renderer.bridge(
                history, stopped=stopped, messages=messages, tools=tools, history=known or ()
            )
            if gone_on is not None:
                return Point(gone_on, conversation)
        if conversation is None:
            raise ValueError(
                "the model's chat template cannot go on from what was said as text or token ids; begin with messages, "
                "or in a branch with history=[]"
            )
        return Point(self._renderer.render(conversation, tools=tools), conversation)

    @property
    def ends(self) -> Sequence[int]:
        """What the template writes behind an answer, where the model does not say so."""
        return () if self._renderer is None else self._renderer.stop_token_ids

    def read(self, reply: Reply, *, tools: Sequence[Mapping[str, Any]], num_before: int) -> tuple[Turn, Message]:
        """The answer, with its calls as the template writes them; and the same as a part of a conversation."""
        ids, stopped = reply.ids, reply.finish_reason == "stop"
        text = answer_text(self._tokenizer, ids, ends=self._stop_token_ids)
        calls: Sequence[ToolCall] = ()
        message: Message = {"role": "assistant", "content": text}
        if self._renderer is not None:
            answer = self._renderer.parse(ids, stopped=stopped, tools=tools, num_before=num_before)
            calls, message = answer.tool_calls, answer.as_message()
        turn = Turn(reply.number, text, ids, reply.logprobs, reply.finish_reason, calls, reply.versions)
        return turn, message


Model = Callable[[Sequence[int], Mapping[str, Any]], Awaitable[Reply]]
"""Tokens, and how is sampled, as the model endpoint's `sampling_params` have it -> what follows them. Raises
EpisodeEndedError at a limit of the episode, RefusedError if the request can never be answered."""
Judge = Callable[[str], Awaitable[float]]
"""The answer's text -> what `rollout.reward` gives it; JudgeError after its last try."""


@dataclass(slots=True)
class Record:
    """An agent's report on its episode, beside the tokens."""

    notes: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    untrained: list[int] = field(default_factory=list)
    """Turns from which nothing is to be learned."""
    ended: str = ""
    """The limit that the last request came to."""
    num_refused: int = 0
    """Requests that came to it, one after the other."""


class Session:
    """One history of an episode."""

    def __init__(
        self,
        model: Model,
        language: ModelLanguage,
        judge: Judge,
        history: Sequence[int],
        *,
        conversation: Sequence[Message] | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        """
        Args:
            history: the tokens that it begins with; an agent finds the prompt there.
            conversation: the same as messages, if it is one.
            endpoint: where others reach the model.
        """
        self._model, self._language, self._judge = model, language, judge
        self._point = Point(tuple(history), conversation)
        self._behind: dict[int, Point] = {}
        """Where each turn of the episode has led to."""
        self.record = Record()
        """What was noted of the episode so far."""
        self._endpoint = endpoint
        self._tools: Sequence[Mapping[str, Any]] = ()

    @property
    def ids(self) -> Sequence[int]:
        """The history: everything that was said and made in it."""
        return tuple(self._point.history)

    @property
    def endpoint(self) -> Endpoint:
        """Where a program of somebody else's speaks to the model: what it makes is of this episode, too.

        Raises:
            RuntimeError: if the agent is tried without one.
        """
        if self._endpoint is None:
            raise RuntimeError("this session has no endpoint; a rollout worker's has")
        return self._endpoint

    async def say(self, words: Words, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add a message for the model to the history; nothing is learned from it.

        Args:
            words: text as it is, without special tokens; token ids; or messages of a conversation, which the model's
                chat template renders. Messages go on from what the history is: a tool's output, a user's reply.
            tools: schemas that the template shows the model, if the history begins here.

        Raises:
            EpisodeEndedError: if the words alone are longer than a sequence may be.
            ValueError: for messages, if the model has no chat template.
        """
        self._tools = tools or self._tools
        if words:
            try:
                self._point = self._language.go_on(self._point, words, tools=self._tools)
            except EpisodeEndedError as error:
                self.record.ended = error.reason
                raise

    async def generate(
        self,
        max_new_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        temperature: float | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        train: bool = True,
    ) -> Turn:
        """The model's next answer, which is part of the history from now on.

        Args:
            max_new_tokens: at most; None is `rollout.sampling.max_new_tokens`, which is the most that there is.
            stop: texts that end the answer; the token that completes one is its last.
            temperature: None is that of the row or the trial. From an answer that is sampled in another way nothing is
                learned.
            tools: schemas of what the answer may ask for; None are those of the last `say`.
            train: False for an answer from which nothing is to be learned.

        Raises:
            EpisodeEndedError: if a limit of the episode leaves no room for an answer.
        """
        point = self._point
        asked_for = {
            "max_tokens": max_new_tokens,
            "stop": [stop] if isinstance(stop, str) else list(stop),
            "stop_token_ids": list(self._language.ends) if point.conversation is not None else [],
            "own_temperature": temperature,
        }
        sampling = {name: value for name, value in asked_for.items() if value not in (None, [])}
        try:
            reply = await self._model(point.history, sampling)
        except EpisodeEndedError as error:
            self.record.ended = error.reason
            self.record.num_refused += 1
            if self.record.num_refused > _MAX_REFUSED:
                raise AsksOnError(
                    f"the agent asked {_MAX_REFUSED} times in an episode that had ended: {error}"
                ) from error
            raise
        self.record.ended, self.record.num_refused = "", 0
        self._tools = tools or self._tools
        turn, message = self._language.read(reply, tools=self._tools, num_before=len(point.history))
        conversation = None if point.conversation is None else [*point.conversation, message]
        self._point = Point([*point.history, *reply.ids], conversation, turn)
        self._behind[turn.number] = self._point
        if not train:
            self.record.untrained.append(turn.number)
        return turn

    def branch(self, after: Turn | int | None = None, *, history: Sequence[int] | None = None) -> "Session":
        """Another history of the same episode: what is generated there is a sequence of its own.

        Args:
            after: go on behind this turn of the episode; None goes on from here.
            history: begin with these tokens instead; [] with none.
        """
        branch = copy.copy(self)  # of the same episode: record and turns are those of all its sessions
        if history is not None:
            branch._point = Point(tuple(history), None if history else ())
        elif after is not None:
            branch._point = self._behind[after.number if isinstance(after, Turn) else after]
        return branch

    async def judge(self, answer: Turn | str | None = None) -> float:
        """What `rollout.reward` says of an answer, None of the last one; it counts only if the agent returns it.

        Raises:
            JudgeError: if the reward fails, or judges groups only.
        """
        given = answer if answer is not None else self._point.last
        if given is None:
            raise ValueError("there is no answer to judge: nothing was generated, or something was said since")
        return await self._judge(given.text if isinstance(given, Turn) else given)

    def reward(self, value: float, *, turn: Turn | int) -> None:
        """Add to the reward of one turn, beside the episode's own.

        Raises:
            ValueError: if it is not finite.
            KeyError: if there is no such turn.
        """
        number = turn.number if isinstance(turn, Turn) else turn
        if number not in self._behind:
            raise KeyError(f"the episode has no turn {number}; it has {sorted(self._behind)}")
        reward = float(value)
        if not math.isfinite(reward):
            raise ValueError(f"a turn's reward must be a finite number, got {reward}")
        self.record.turn_rewards.append((number, reward))

    def note(self, **numbers: float) -> None:
        """Numbers of the episode, whose means over a train step stand in `metrics.jsonl` as `notes/NAME`; a mean leaves
        out those that are not finite."""
        self.record.notes |= {name: side_number(value) for name, value in numbers.items()}
