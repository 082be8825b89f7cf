"""GenerationClient: token ids in, token ids with logprobs and versions out, whatever happens to the servers.

    sample_group ──► route (manager) ──► POST /generate with every unfinished answer ──► chunks ──► PartialAnswer
                        ▲  ▲                      │
                        │  └── busy (503), pause ─┤   the server is well; it is asked again, or another that has room
                        └──── lost, failed ───────┤   the manager is told; another server continues
                                                  └─ refused (400): the request is at fault, on any server

The answers keep their tokens through all of it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import aiohttp

from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.rollout.partial_rollout import MalformedChunkError, PartialAnswer
from corral.workers.rollout.routed_experts import AnswerExperts

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

    async def sample_group(
        self, uid: str, prompt_ids: Sequence[int], *, seeds: Sequence[int], enough: int | None = None
    ) -> list[PartialAnswer]:
        """Sample one answer to a prompt for each of `seeds`; the same ones, by whichever servers, for the same weights.

        Args:
            enough: once so many have ended, they are returned, and the others are asked for no further; None: all.

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
        enough = len(answers) if enough is None else enough
        while len(unfinished := [answer for answer in answers if not answer.finished]) > len(answers) - enough:
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
        return [answer for answer in answers if answer.finished][:enough]

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
