"""Judge: a language model as reward, by any endpoint of OpenAI's API.

    answer ──prompt──► known? ──► verdict ◄──regular expression── reply
                         └── no ──► budget left? ──► POST {url}/chat/completions
                                       │                 └── down, busy, late: again, then EndpointDownError
                                       └── no: the trial ends, or the reward fails

What fails is a failure of the reward, which is called again and then counted; nothing is guessed. All calls of a
rollout worker are in one process, which knows what was said and what was spent since it started.
"""

import asyncio
import re
import string
from collections import OrderedDict
from hashlib import blake2b
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, PrivateAttr, model_validator

from corral.experiments.config.condition import FindingPattern, last_found
from corral.experiments.config.endpoint import TRIAL, EndpointConfig
from corral.workers.rewards.contract import Problem, StopTrialError
from corral.workers.rewards.endpoint import SHOWN, EndpointDownError, ask, without_key

_MOST_SAID = 4000  # characters of a reply that are kept: what comes last, the verdict with them


_NUMBER = r"-?\d+(?:\.\d+)?"
_SCALE = (  # (0-10), from 1 to 10, out of 10, /10: not the verdict, which follows it
    r"(?:[\s*_]{0,4}[(\[]?\s?(?:\b(?:on|a|scale|range|from|between|of|in)\b\s{0,3}){0,6}"
    rf"(?:{_NUMBER}\s?(?:[-,]|\u2013|to|and)\s?{_NUMBER}|(?:/|\b(?:out|max|maximum)\b)[^\d\n]{{0,5}}\d+)"
    r"\s?[)\]]?[\s*_]{0,4}(?=[:=-]|is\b|\n))"
)
_LINK = (
    r"(?:[^\w-]|-(?!\d)|\b(?:is|was|would|will|should|be|of|as|for|the|this|that|answer|response|an?|it|final)\b){0,40}"
)
_VERDICT = (
    r"(?i)(?<!perfect )(?<!maximum )(?<!highest )(?<!lowest )(?<!full )(?:verdict|score|rating|grade)s?\b"
    rf"{_SCALE}?{_LINK}(?<![\d.])({_NUMBER})"
    r"(?!\d|[.,]\d|\s?(?:[-+*=]|\u2013|to\b)\s?\d|\s(?:means|indicates)\b)"
)

Verdict = tuple[float, dict[str, str]]
"""The number, and `said`: what the model has said."""


class BudgetSpentError(RuntimeError):
    """The judge may ask no more."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    total_tokens: int = 0


class _Completion(msgspec.Struct):
    """What is read of a chat completion."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage | None = None


class Judge(EndpointConfig):
    """The number that a language model gives an answer; async."""

    url: str = Field(pattern=r"^(trial$|https?://[^/@\s]+(/|$))")
    """Of the API, to which `/chat/completions` is added: https://host/v1. It appears in logs: no password. `trial`: the
    trial's own judge, `rollout.judge`."""
    model: str = "judge"
    """As the endpoint calls it."""
    prompt: str
    """What it is asked: a format string with `{answer}` and fields of the row, `{problem[question]}`."""
    verdict: FindingPattern = _VERDICT
    """Where the number is in what it says: the first group of the last match. Without a setting: behind verdict, score,
    rating or grade, and behind the scale, if it is named: "Score (0-10): 7"."""
    lowest: float = 0.0
    """A number below is none."""
    highest: float = 10.0
    """Nor is one above."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1024}
    """Further fields of the request."""
    max_calls: int | None = Field(default=None, ge=0)
    """Most requests of a rollout worker since it started; None: no limit."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Most tokens, by what the endpoint says that it has used; nothing is asked once they are reached."""
    when_spent: Literal["stop", "drop"] = "stop"
    """`stop`: the trial ends, and says so. `drop`: prompts are dropped and counted, but for verdicts that are known."""
    known_verdicts: int = Field(default=10_000, ge=0)
    """Verdicts that a worker remembers."""

    _verdicts: OrderedDict[bytes, Verdict] = PrivateAttr(default_factory=OrderedDict)
    """What this process knows, by digest of the prompt, the least recently used first."""
    _asked: dict[bytes, "asyncio.Task[Verdict]"] = PrivateAttr(default_factory=dict)
    """Under way: the answers of a group are often equal."""
    _num_calls: int = PrivateAttr(default=0)
    _num_tokens: int = PrivateAttr(default=0)

    @model_validator(mode="after")
    def _has_the_answer(self) -> Self:
        try:
            fields = {re.split(r"[.\[]", name or "")[0] for _, name, _, _ in string.Formatter().parse(self.prompt)}
        except ValueError as error:
            raise ValueError(f"prompt is no format string: {error}; write {{{{ and }}}} for braces") from error
        if "answer" not in fields:
            raise ValueError("prompt has no {answer}; the judge would not see it")
        if self.url == TRIAL and self.key:
            raise ValueError("the trial's own judge gets a key from the trial; remove key")
        if self.lowest > self.highest:
            raise ValueError(f"lowest {self.lowest:g} is above highest {self.highest:g}: no verdict is between them")
        return self

    async def __call__(self, problem: Problem, answer: str) -> Verdict:
        """A number between `lowest` and `highest`, and what was said.

        Raises:
            EndpointDownError, BudgetSpentError, StopTrialError: as above.
            ValueError: if the reply has no verdict, or the endpoint refuses the request.
            KeyError: if the row has no field that the prompt names.
        """
        prompt = self.prompt.format(problem=problem, answer=answer)
        digest = blake2b(prompt.encode(errors="replace")).digest()
        if digest in self._verdicts:
            self._verdicts.move_to_end(digest)
            return self._verdicts[digest]
        if (asked := self._asked.get(digest)) is None:
            asked = self._asked[digest] = asyncio.create_task(self._ask(prompt))
            asked.add_done_callback(lambda task: self._remember(digest, task))
        # A caller whose time is up leaves the answer to its next try.
        return await asyncio.shield(asked)

    def _remember(self, digest: bytes, task: "asyncio.Task[Verdict]") -> None:
        del self._asked[digest]
        if not task.cancelled() and task.exception() is None:
            self._verdicts[digest] = task.result()
            while len(self._verdicts) > self.known_verdicts:
                self._verdicts.popitem(last=False)

    async def _ask(self, prompt: str) -> Verdict:
        if self.url == TRIAL:
            raise EndpointDownError("the trial's own judge answers while the trial runs, and only there")
        body = {**self.sampling, "model": self.model, "messages": [{"role": "user", "content": prompt}]}
        text = await ask(self, "chat/completions", body, before_try=lambda _: self._count())
        try:
            reply = msgspec.json.decode(text, type=_Completion)
        except msgspec.DecodeError as error:
            reply_text = without_key(self, text)[:SHOWN]
            raise ValueError(f"{self.url} answers what is no chat completion: {reply_text}") from error
        self._num_tokens += reply.usage.total_tokens if reply.usage else 0
        return self._verdict_of(without_key(self, reply.choices[0].message.content or ""))

    def _verdict_of(self, answer: str) -> Verdict:
        found = last_found(self.verdict, answer)
        if found is None:
            raise ValueError(f"the judge gave no verdict that {self.verdict!r} finds: {answer[-SHOWN:]!r}")
        number = float(found)
        if not self.lowest <= number <= self.highest:
            raise ValueError(f"the judge's verdict {number} is not between {self.lowest:g} and {self.highest:g}")
        return number, {"said": answer[-_MOST_SAID:]}

    def _count(self) -> None:
        for name, spent in (("max_calls", self._num_calls), ("max_tokens", self._num_tokens)):
            if (limit := getattr(self, name)) is not None and spent >= limit:
                error = StopTrialError if self.when_spent == "stop" else BudgetSpentError
                reason = f"the judge's {name} is {limit}, and so many were spent"
                raise error(f"{reason}; rl-submit --resume goes on with as much again")
        self._num_calls += 1
