"""GroupMaker: one prompt becomes one judged group that a train step can use, or the reason why it cannot.

    row ──encode──► agent ⇄ generation servers, judge ──► checks ──► group, sample
                      │ raised, gave back what no step can use, or waited too long for something of its own
                      ├── again, `rollout.reward_retries` times
                      ├── PromptFailedError: the prompt is dropped and counted
                      ├── PromptsFailError: so many in a row failed that something else is to blame
                      └── UserCodeError: and none was ever judged: the code is

Whatever user code raises ends in one of these; what others are to blame for (servers, streams) passes through.

GenerationClient: token ids in, token ids with logprobs and versions out, whatever happens to the servers.

    sample_group ──► route (manager) ──► POST /generate with every unfinished answer ──► chunks ──► PartialAnswer
                        ▲  ▲                      │
                        │  └── busy (503), pause ─┤   the server is well; it is asked again, or another that has room
                        └──── lost, failed ───────┤   the manager is told; another server continues
                                                  └─ refused (400): the request is at fault, on any server

The answers keep their tokens through all of it.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import aiohttp

from corral.experiments.config.rollout import RolloutConfig, SamplingConfig
from corral.experiments.inputs.dataset_file import DatasetRow
from corral.experiments.inputs.tokens import encode_prompt
from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.data.answer_seed import group_seeds
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.rollout.agent_run import AgentRun
from corral.workers.rollout.agents import JudgedGroup
from corral.workers.rollout.judging import RewardFailedError, RewardJudge, ThreadsHangError
from corral.workers.rollout.partial_rollout import MalformedChunkError, PartialAnswer
from corral.workers.rollout.routed_experts import AnswerExperts
from corral.workers.rollout.trajectories import make_sample
from corral.workers.streams.errors import StreamError
from corral.workers.user_code.blame import describe_error
from corral.workers.user_code.trials import checked_reward

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.1
_BUSY_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_REFUSALS = (400, 413, 422)  # every server would say the same of this request
_BUSY = (429, 503)


@dataclass(frozen=True)
class Setback:
    """Why the last chunk of a group did not come."""

    url: str
    is_busy: bool
    """Whether the server only had no room: it is well."""
    lost: str = ""
    """How the connection to it ended, if it did."""


RouteFunction = Callable[[str, int, str, Setback | None], Awaitable[str | None]]
"""(uid, tokens that may come, oldest version of those that have come or "", what happened to the last chunk) -> a
server's URL, or None while none is ready."""


class GenerationFailedError(RuntimeError):
    """A group could not be generated before its deadline; the prompt is issued again later."""


class RequestRefusedError(RuntimeError):
    """A server says that the request itself is wrong; it would be refused anywhere, and for ever."""


@dataclass(frozen=True, slots=True)
class GenerationClient:
    """The side of the rollout worker that talks HTTP to generation servers."""

    session: aiohttp.ClientSession
    route: RouteFunction
    _: KW_ONLY
    sampling: SamplingConfig
    stop_token_ids: Sequence[int]
    new_tokens_per_chunk: int
    request_timeout_s: float
    experts: RoutedExpertsSpec | None = None
    """Of a mixture, if it is wanted to be known who computed each token."""

    async def sample_group(self, uid: str, prompt_ids: Sequence[int], *, seeds: Sequence[int]) -> list[PartialAnswer]:
        """Sample one answer to a prompt for each of `seeds`; the same ones, by whichever servers, for the same weights.

        Raises:
            RequestRefusedError: if a server finds fault with the request.
            GenerationFailedError: if no server took it further for `request_timeout_s`; one that has no room for it
                answers, and that time does not count.
        """
        max_new_tokens = self.sampling.max_new_tokens
        answers = [
            PartialAnswer(
                max_new_tokens=max_new_tokens,
                sampling_seed=seed,
                experts=None if self.experts is None else AnswerExperts(self.experts, prompt_ids),
            )
            for seed in seeds
        ]
        setback: Setback | None = None
        last_tried = "none"
        num_busy = 0
        last_progress = time.monotonic()
        while unfinished := [answer for answer in answers if not answer.finished]:
            if time.monotonic() - last_progress > self.request_timeout_s:
                raise GenerationFailedError(
                    f"no generation server took prompt {uid} further for {self.request_timeout_s:.0f} s "
                    f"(last tried: {last_tried})"
                )
            versions = {span.version for answer in answers for span in answer.spans}
            oldest = min(versions, key=PolicyVersion.parse, default="")
            url = await self.route(uid, self.new_tokens_per_chunk * len(unfinished), oldest, setback)
            setback = None  # told once: told again, it would bench a server that has come back in the meantime
            if url is None:
                await asyncio.sleep(_RETRY_PAUSE_S)
                continue
            last_tried = url
            before = sum(len(answer.output_ids) for answer in unfinished)
            setback = await self._one_chunk(url, prompt_ids, unfinished)
            if setback is not None and setback.is_busy:
                last_progress = time.monotonic()
                await asyncio.sleep(_BUSY_PAUSES_S[min(num_busy, len(_BUSY_PAUSES_S) - 1)])
                num_busy += 1
                continue
            num_busy = 0
            if setback is not None:
                await asyncio.sleep(_RETRY_PAUSE_S)
                if setback.lost:
                    # Only now: where a trial ends, its servers leave at once, and whoever asked them within this pause.
                    logger.warning("%s/generate failed: %s", setback.url, setback.lost)
            if sum(len(answer.output_ids) for answer in unfinished) > before or all(a.finished for a in unfinished):
                last_progress = time.monotonic()
        return answers

    async def _one_chunk(self, url: str, prompt_ids: Sequence[int], answers: list[PartialAnswer]) -> Setback | None:
        """Ask one server for the next tokens of `answers`; None if they came."""
        shared: dict[str, Any] = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "stop_token_ids": list(self.stop_token_ids),
        }
        body: dict[str, Any] = {
            "input_ids": [[*prompt_ids, *answer.output_ids] for answer in answers],
            "sampling_params": [
                {
                    **shared,
                    "max_new_tokens": min(self.new_tokens_per_chunk, answer.remaining),  # lengths differ after an abort
                    "sampling_seed": answer.sampling_seed,
                }
                for answer in answers
            ],
            "return_logprob": True,
        }
        # One number for all of them; those that know more leave out what they know.
        experts_from = min((answer.experts.num_rows for answer in answers if answer.experts is not None), default=0)
        if self.experts is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": experts_from}
        try:
            async with self.session.post(
                f"{url}/generate", json=body, timeout=aiohttp.ClientTimeout(total=self.request_timeout_s)
            ) as response:
                if response.status != 200:
                    return _judge_refusal(url, response.status, (await response.text())[:500])
                chunks = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return Setback(url, is_busy=False, lost=str(error) or type(error).__name__)
        took_in = _take_in(chunks, answers, url, num_prompt_tokens=len(prompt_ids), experts_from=experts_from)
        return None if took_in else Setback(url, is_busy=False)


def _judge_refusal(url: str, status: int, text: str) -> Setback:
    """What a status other than 200 means for the server; RequestRefusedError if it means nothing for it."""
    if status in _REFUSALS:
        raise RequestRefusedError(f"{url}/generate answered {status}: {text}")
    is_busy = status in _BUSY
    level = logging.INFO if is_busy else logging.WARNING
    logger.log(level, "%s/generate answered %d: %s", url, status, text)
    return Setback(url, is_busy=is_busy)


def _take_in(chunks: Any, answers: list[PartialAnswer], url: str, *, num_prompt_tokens: int, experts_from: int) -> bool:
    if not isinstance(chunks, list) or len(chunks) != len(answers):
        logger.warning("%s/generate answered something else than %d replies", url, len(answers))
        return False
    try:
        for answer, chunk in zip(answers, chunks, strict=True):
            answer.extend(chunk, num_prompt_tokens=num_prompt_tokens, experts_from=experts_from)
    except MalformedChunkError as error:
        logger.warning("%s: %s", url, error)
        return False
    return True


_MAX_FAILED_IN_A_ROW = 16  # if every second prompt failed by itself, a run of so many would come once in 65,536 prompts

Agent = Callable[..., Awaitable[JudgedGroup]]


class PromptTooLongError(ValueError):
    """A prompt has more tokens than `dataset.max_prompt_tokens`: it would not fit a micro-batch."""


class PromptFailedError(RuntimeError):
    """A prompt is given up; its text begins with why, as the ledger has it."""


_FAILURES: dict[type[Exception], str] = {
    RewardFailedError: "reward_error",
    PromptTooLongError: "prompt_too_long",
    RequestRefusedError: "request_refused",
}


class PromptsFailError(RuntimeError):
    """Agent or reward fail on everything now, and did not before: the worker starts again, as what they ask may do."""


@dataclass(slots=True)
class GroupMaker:
    """Makes the groups of one rollout worker, many at a time."""

    agent: Agent
    judge: RewardJudge
    client: GenerationClient
    tokenizer: Any
    _: KW_ONLY
    config: RolloutConfig
    trial_seed: int
    group_size: int
    max_prompt_tokens: int
    num_prompts: int = _MAX_FAILED_IN_A_ROW
    """Of the worker's share; if all of them fail, nothing is left to try."""
    has_judged: bool = False
    """Whether a prompt of the trial was ever judged."""
    _failed_in_a_row: int = field(default=0, init=False)

    async def make(self, uid: str, row: DatasetRow, *, order: int) -> tuple[JudgedGroup, SequenceSample]:
        """The group of one prompt, whose answers follow from the trial's seed and the prompt's admission number.

        Raises:
            PromptFailedError: the prompt is to be dropped and counted.
            UserCodeError, PromptsFailError, ThreadsHangError: the worker has to end.
            GenerationFailedError, StreamError: the prompt is to be issued again.
        """
        try:
            made = await self._make(uid, row, order=order)
        except PromptFailedError as error:
            self._failed_in_a_row += 1
            logger.warning("prompt %s failed: %s", uid, error, exc_info=error.__cause__)
            if self._failed_in_a_row >= min(_MAX_FAILED_IN_A_ROW, self.num_prompts):
                raise self._all_fail(
                    f"{self._failed_in_a_row} prompts in a row failed, the last one with {error}"
                ) from (error.__cause__)
            raise
        self._failed_in_a_row = 0
        self.has_judged = True
        return made

    def _all_fail(self, what: str) -> RuntimeError:
        if self.has_judged:
            return PromptsFailError(f"{what}; mend agent {self.config.agent} or reward {self.config.reward}")
        return UserCodeError(
            f"{what}; mend agent {self.config.agent} or reward {self.config.reward}, in the folder `code` of the trial "
            "if it is your own, and rl-submit --resume it"
        )

    async def _make(self, uid: str, row: DatasetRow, *, order: int) -> tuple[JudgedGroup, SequenceSample]:
        # One after the other for all tries: what made an agent fail may be the answers, so the next try has others.
        seeds_by_call = (
            group_seeds(self.trial_seed, order=order, group_size=self.group_size, call=call)
            for call in itertools.count()
        )
        for tries_left in reversed(range(1 + self.config.reward_retries)):
            try:
                return await self._try(uid, row, seeds_by_call)
            except (GenerationFailedError, StreamError, ThreadsHangError):
                raise
            except tuple(_FAILURES) as error:  # what a further try would meet again; the judge has made its own
                kind = next(kind for cause, kind in _FAILURES.items() if isinstance(error, cause))
                raise PromptFailedError(f"{kind}: {error}") from error
            except BaseException as error:  # user code: even SystemExit may come out of it, and CancelledError
                if _is_being_cancelled():
                    raise
                if tries_left == 0:
                    raise PromptFailedError(f"agent_error: {describe_error(error)}") from error
                logger.warning("the agent failed on prompt %s: %s", uid, describe_error(error))
        raise AssertionError("the last try returns or raises")

    async def _try(
        self, uid: str, row: DatasetRow, seeds_by_call: Iterator[list[int]]
    ) -> tuple[JudgedGroup, SequenceSample]:
        async def sample_group(ids: Sequence[int]) -> list[PartialAnswer]:
            self._check_prompt(ids)
            return await self.client.sample_group(uid, ids, seeds=next(seeds_by_call))

        prompt_ids = encode_prompt(self.tokenizer, row.prompt)
        self._check_prompt(prompt_ids)
        run = AgentRun(self.config.agent, timeout_s=self.config.agent_timeout_s)
        group = await run.wait(self.agent(row.fields, prompt_ids, run.asks(sample_group), run.asks(self.judge)))
        self._check_group(group)
        return group, make_sample(uid, group, experts=self.client.experts)

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if len(ids) > self.max_prompt_tokens:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, more than dataset.max_prompt_tokens {self.max_prompt_tokens}"
            )

    def _check_group(self, group: object) -> None:
        """What the trainer relies on; ValueError if an agent of somebody's own does not keep to it."""
        if not isinstance(group, JudgedGroup):
            raise ValueError(f"an agent returns a JudgedGroup, got {type(group).__name__}")
        if not group.answers or len(group.answers) != len(group.rewards):
            raise ValueError(
                f"a group has one reward for each of its answers, got {len(group.rewards)} for {len(group.answers)}"
            )
        if not group.prompt_ids:
            raise ValueError("a prompt has at least one token, got none")
        self._check_prompt(group.prompt_ids)
        for answer, reward in zip(group.answers, group.rewards, strict=True):
            checked_reward(reward)
            if len(answer.output_ids) > self.config.sampling.max_new_tokens:
                raise ValueError(
                    f"an answer has {len(answer.output_ids)} tokens, more than rollout.sampling.max_new_tokens "
                    f"{self.config.sampling.max_new_tokens}"
                )


def _is_being_cancelled() -> bool:
    """Whether the running task was asked to end, and did not just meet a CancelledError of an agent's making."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
