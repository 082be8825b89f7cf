"""GenerationClient: token ids in, token ids with logprobs and versions out, whatever happens to the servers.

    sample_group ──► one server for the group (manager) ──► a stream for each answer ──► events ──► PartialAnswer
                        ▲  ▲                                  │
                        │  └── busy (503), pause, abort ──────┤   the server is well; another one is asked, or it again
                        ├──── not to be reached ──────────────┤   reported to the manager; another server continues
                        └──── silent, failed (500) ───────────┤   the same, within the budget of `FailureBudget`
                                                              └─ refused (400), not finite, budget spent: the request
                                                                 is at fault, on any server: RequestRefusedError

Each answer goes on by itself, and keeps its tokens through all of it: what is asked for anew is the rest, behind the
prompt and the tokens so far.

    asked ──token_timeout_s──► first tokens ──token_timeout_s──► more ──token_timeout_s──► ... ──► its end

A server that says nothing for so long is lost. Nothing is while none is ready: an answer waits for it with what it has.
"""

import asyncio
import copy
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import aiohttp
import msgspec

from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.trial.spans import Span
from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.episodes.partial_answer import MalformedEventError, PartialAnswer, Watch, stopper
from corral.workers.episodes.routed_experts import AnswerExperts
from corral.workers.episodes.stream_events import NOT_FINITE, stream_events
from corral.workers.episodes.turn_request import SERVER_ERROR, RequestRefusedError
from corral.workers.lifecycle.timeline import Record, unrecorded
from corral.workers.streams.closing import cancel
from corral.workers.streams.live_timeout import LiveTimeout

logger = logging.getLogger(__name__)

_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # before the next try, the longer the more were in vain
_REFUSALS = (400, 413, 422)  # every server would say the same of this request
_BUSY = (429, 503)
_JSON = {"Content-Type": "application/json"}
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # deadlines are those of the phases
_MOST_FAILED, _MOST_FAILED_ALONE = 4, 8  # requests for one answer in a row, the second if nobody has got a token since
_NEWEST = 0.01
_FIRST_FRACTION = 0.4  # of the longest answer, while none has ended; AReaL's manager always expects this
_STREAM_INTERVAL = 32  # tokens of an event: what a lost server costs an answer, and few enough events to cost nothing


@dataclass(frozen=True)
class FailedTry:
    """Why a stream has ended before its answer."""

    url: str
    is_busy: bool
    """Whether the server is well: it only had no room, or has given the answer up."""
    reason: str
    is_lost: bool = False
    """Whether the server could not be reached, so that it has not seen the request."""
    aborted_at: str | None = None
    """Where it has given the answer up without a token of it: the version of the weights that it had."""

    @property
    def kind(self) -> Literal["busy", "lost", "failed"]:
        return "busy" if self.is_busy else "lost" if self.is_lost else "failed"


RouteFunction = Callable[[str, int, str, FailedTry | None], Awaitable[str | None]]
"""(uid, tokens that a server is expected to hold for it, oldest version of those that have come or "", what has just
happened to an answer) -> a server's URL, or None while none is ready."""


@dataclass(slots=True)
class FailureBudget:
    """How many requests for one answer may fail in a row, before it is the answer that is at fault.

    Servers that fail at everything are no answer's fault: so it counts whether others get tokens in the meantime.

    Example:
        budget = FailureBudget(num_servers=2)
        budget.is_spent_by("http://a", others_go_on=True)   # False; True for the fourth, if they are of two servers
    """

    num_servers: int
    """Of the trial: where there are several, two of them have to fail."""
    _urls: list[str] = field(default_factory=list)
    _num_beside_others: int = 0

    def is_spent_by(self, url: str, *, others_go_on: bool) -> bool:
        """Another request has failed, by this server.

        Args:
            others_go_on: whether another answer has got a token since the last one failed.
        """
        self._urls.append(url)
        self._num_beside_others += others_go_on
        is_of_several = len(set(self._urls)) >= min(2, self.num_servers)
        return len(self._urls) >= _MOST_FAILED_ALONE or (is_of_several and self._num_beside_others >= _MOST_FAILED)


class _Lengths:
    """How long answers become: the mean of the last ones, of which the newest counts 1 %."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._weight = 0.0
        self.num_events = 0
        """That have brought tokens, of all answers."""

    def ended(self, length: int) -> None:
        """An answer has so many tokens."""
        self._mean += _NEWEST * (length - self._mean)
        self._weight += _NEWEST * (1.0 - self._weight)

    def further(self, remaining: int) -> int:
        """What is expected to come yet of an answer of which so many tokens may. That does not depend on how many have
        come: of lengths that spread widely those that have become long become longer still."""
        mean = self._mean / self._weight if self._weight else _FIRST_FRACTION * remaining
        return min(remaining, math.ceil(mean))


class _Assignment:
    """The server that a group was sent to, once."""

    def __init__(self, url: str) -> None:
        self.url = url


@dataclass(slots=True)
class _Group:
    """One prompt and its answers, which share a server: its cache has what they share."""

    uid: str
    prompt_ids: Sequence[int]
    answers: Sequence[PartialAnswer]
    sampling: SamplingConfig
    oldest_version: str = ""
    """Of what came before, in other answers; "" if nothing did."""
    watch: Watch | None = None
    assignment: _Assignment | None = None
    assigned_s: float = math.inf
    """When it first had one."""
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class GenerationClient:
    """The side of the rollout worker that talks HTTP to generation servers."""

    session: aiohttp.ClientSession
    route: RouteFunction
    _: KW_ONLY
    sampling: SamplingConfig
    stop_token_ids: Sequence[int]
    token_timeout_s: float
    tokenizer: Any = None
    """Reads answers where texts of `sampling` end them."""
    experts: RoutedExpertsSpec | None = None
    """Of a mixture, if it is wanted to be known who computed each token."""
    num_servers: int = 1
    """Of the trial, ready or not."""
    record: Record = unrecorded
    """Has how long each group of answers took; it waits for the URL of its server."""
    _lengths: _Lengths = field(default_factory=_Lengths, init=False)
    _under_way: Counter[str] = field(default_factory=Counter, init=False)
    """Answers that `complete` makes now, by uid: a group's episodes share a server, and each has its own."""

    def sampling_by(self, **changes: float) -> "GenerationClient":
        """The same, with all that it knows, for answers that are sampled otherwise."""
        changed = copy.copy(self)
        object.__setattr__(changed, "sampling", self.sampling.model_copy(update=changes))
        return changed

    async def sample_group(
        self, uid: str, prompt_ids: Sequence[int], *, seeds: Sequence[int], enough: int | None = None
    ) -> list[PartialAnswer]:
        """Sample one answer to a prompt for each of `seeds`; the same ones, by whichever servers, for the same weights.

        Args:
            enough: how many answers to wait for: those that are finished first. The others are given up, and their
                servers hear of it. None waits for all.

        Returns:
            Finished answers, in the order of their seeds.

        Raises:
            RequestRefusedError: if no server will ever answer one of them.
        """
        answers = [
            PartialAnswer(
                max_new_tokens=self.sampling.max_new_tokens,
                sampling_seed=seed,
                experts=None if self.experts is None else AnswerExperts(self.experts, prompt_ids),
            )
            for seed in seeds
        ]
        group = _Group(uid, prompt_ids, answers, self.sampling, watch=stopper(self.tokenizer, self.sampling.stop))
        tasks = [asyncio.create_task(self._finish(group, index)) for index in range(len(answers))]
        try:
            finished = [await done for done in itertools.islice(asyncio.as_completed(tasks), enough)]
        finally:
            await cancel(*tasks)
            self._note(group)
        return [answers[index] for index in sorted(finished)]

    async def complete(
        self,
        uid: str,
        prompt_ids: Sequence[int],
        answer: PartialAnswer,
        *,
        sampling: SamplingConfig,
        oldest_version: str = "",
        watch: Watch | None = None,
    ) -> None:
        """Make one answer, as `sample_group` does.

        Args:
            oldest_version: of the tokens that came before in the same episode: no older weights may go on from them.
        """
        self._under_way[uid] += 1
        group = _Group(uid, prompt_ids, [answer], sampling, oldest_version, watch)
        try:
            await self._finish(group, 0)
        finally:
            self._note(group)
            self._under_way[uid] -= 1
            if not self._under_way[uid]:
                del self._under_way[uid]

    def _note(self, group: _Group) -> None:
        if group.assignment is not None:
            span = Span(
                lane="answers",
                name="generate",
                start_s=group.assigned_s,
                end_s=time.monotonic(),
                waits_for=(group.assignment.url,),
                about=group.uid,
                tokens=sum(len(answer.output_ids) for answer in group.answers),
            )
            self.record(span)

    async def _finish(self, group: _Group, index: int) -> int:
        """Make one answer, however many requests that takes; its index."""
        answer, num_futile = group.answers[index], 0
        budget, aborted = FailureBudget(self.num_servers), set[tuple[str, str]]()
        assignment, events_seen = await self._assign(group, None, None), self._lengths.num_events
        while True:
            num_before = len(answer.output_ids)
            setback = await self._stream(assignment.url, group, answer)
            if answer.finished:
                self._lengths.ended(len(answer.output_ids))
                return index
            num_futile += 1
            if len(answer.output_ids) > num_before:
                num_futile, budget, aborted = 0, FailureBudget(self.num_servers), set()
            if setback.aborted_at is not None:
                # Other weights are taken over once: a server that gives it up by the same ones again fails at it.
                abort = setback.url, setback.aborted_at
                setback = replace(setback, is_busy=abort not in aborted)
                aborted.add(abort)
            if setback.kind == "failed":
                others_go_on, events_seen = self._lengths.num_events > events_seen, self._lengths.num_events
                if budget.is_spent_by(setback.url, others_go_on=others_go_on):
                    text = f"every request in a row failed, the last at {setback.url}/generate: {setback.reason}"
                    raise RequestRefusedError(text, kind=SERVER_ERROR)
            await _pause(num_futile)
            if not setback.is_busy:
                # Logged after the pause: at the end of a trial servers and clients leave together, and this would be
                # noise.
                logger.warning("%s/generate failed: %s", setback.url, setback.reason)
            assignment = await self._assign(group, assignment, setback)

    async def _assign(self, group: _Group, left: _Assignment | None, setback: FailedTry | None) -> _Assignment:
        """The next server for an answer that leaves its server: where another of its group has gone from there, or
        where the manager says. It hears of one failure of several answers once: told again, it would bench a server
        that has come back in the meantime."""
        async with group.moving:
            if group.assignment is not None and group.assignment is not left:
                return group.assignment
            versions = {span.version for answer in group.answers for span in answer.spans}
            versions |= {group.oldest_version} - {""}
            oldest = min(versions, key=PolicyVersion.parse, default="")
            while (url := await self.route(group.uid, self._expected(group), oldest, setback)) is None:
                setback = None
                await _pause(0)
            group.assignment, group.assigned_s = _Assignment(url), min(group.assigned_s, time.monotonic())
            return group.assignment

    def _expected(self, group: _Group) -> int:
        """Tokens that its server will hold for it; answers in the same request share their prompt."""
        lengths = [
            len(answer.output_ids) + self._lengths.further(answer.remaining)
            for answer in group.answers
            if not answer.finished
        ]
        return max(1, self._under_way[group.uid]) * (len(group.prompt_ids) + sum(lengths))

    async def _stream(self, url: str, group: _Group, answer: PartialAnswer) -> FailedTry:
        """Take in the rest of an answer as one server makes it; what to make of it if that is not all."""
        num_before, silence_s, ended = len(answer.output_ids), self.token_timeout_s, None
        aborted_at = None
        answer.begin()
        try:
            async with (
                LiveTimeout(silence_s) as deadline,
                self.session.post(
                    f"{url}/generate", data=self._body(group, answer), headers=_JSON, timeout=_NO_TIMEOUT
                ) as response,
            ):
                if response.status != 200:
                    return _judge(url, response.status, (await response.text())[:500])
                async for event in stream_events(response.content.iter_any()):
                    if event.error is not None:
                        return _judge(url, event.error.code, event.error.message)
                    reason = answer.extend(event)
                    if reason is not None and reason.err_type == NOT_FINITE:
                        raise RequestRefusedError(f"{url}/generate: {reason.message}", kind=NOT_FINITE)
                    if reason is not None and reason.status_code is not None:
                        return _judge(url, reason.status_code, reason.message)
                    self._lengths.num_events += bool(event.output_ids)
                    if group.watch is not None:
                        group.watch(answer)
                    if answer.stopped and reason is None:
                        break  # it was cut: its server hears that the connection is closed
                    if reason is not None and reason.type == "abort" and event.meta_info is not None:
                        aborted_at = event.meta_info.weight_version
                    ended = reason
                    deadline.renew(silence_s)
        except TimeoutError:
            return FailedTry(url, is_busy=False, reason=f"it said nothing for {silence_s:g} s")
        except aiohttp.ClientConnectorError as error:
            return FailedTry(url, is_busy=False, is_lost=True, reason=str(error))
        except (aiohttp.ClientError, OSError, MalformedEventError, msgspec.MsgspecError) as error:
            return FailedTry(url, is_busy=False, reason=str(error) or type(error).__name__)
        finally:
            answer.settle()
        has_more = len(answer.output_ids) > num_before
        is_busy = ended is not None and (has_more or aborted_at is not None)
        reason_text = "its stream ended before the answer"
        return FailedTry(url, is_busy=is_busy, reason=reason_text, aborted_at=None if has_more else aborted_at)

    def _body(self, group: _Group, answer: PartialAnswer) -> bytes:
        body: dict[str, Any] = {
            "input_ids": [*group.prompt_ids, *answer.output_ids],
            "sampling_params": {
                "temperature": group.sampling.temperature,
                "top_p": group.sampling.top_p,
                "top_k": group.sampling.top_k,
                "min_p": group.sampling.min_p,
                "stop_token_ids": list(self.stop_token_ids),
                "max_new_tokens": answer.remaining,
                "sampling_seed": answer.sampling_seed,
                "stream_interval": _STREAM_INTERVAL,
            },
            "return_logprob": True,
            "stream": True,
        }
        if answer.experts is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": answer.experts.num_rows}
        return msgspec.json.encode(body)


def _judge(url: str, status: int, text: str) -> FailedTry:
    """What a status other than 200 means for the server; RequestRefusedError if it means nothing for it."""
    if status in _REFUSALS:
        raise RequestRefusedError(f"{url}/generate answered {status}: {text}")
    return FailedTry(url, is_busy=status in _BUSY, reason=f"it answered {status}: {text}")


async def _pause(num_futile: int) -> None:
    await asyncio.sleep(_PAUSES_S[min(num_futile, len(_PAUSES_S) - 1)])
