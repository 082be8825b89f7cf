"""GenerationClient: token ids in, token ids with logprobs and versions out, whatever happens to the servers.

sample_group ──► route (manager) ──► POST /generate with every unfinished answer ──► chunks ──► PartialAnswer
                      ▲                         │
                      └── lost, busy, aborted ──┘   the answers keep their tokens; another server continues them
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from corral.experiments.config import SamplingConfig
from corral.workers.rollout.partial_rollout import MalformedChunkError, PartialAnswer

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.1


@dataclass(frozen=True)
class Route:
    """Where the next chunk of a group is generated."""

    url: str


RouteFunction = Callable[[str, int, str], Awaitable[Route | None]]
"""(uid, tokens that may come, url that failed or "") -> a route, or None while no server is ready."""


class GenerationFailedError(RuntimeError):
    """A group could not be generated before its deadline; the prompt is issued again later."""


class GenerationClient:
    """The side of the rollout worker that talks HTTP to generation servers."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        route: RouteFunction,
        *,
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        new_tokens_per_chunk: int,
        request_timeout_s: float,
    ) -> None:
        self._session = session
        self._route = route
        self._sampling = sampling
        self._stop_token_ids = list(stop_token_ids)
        self._chunk = new_tokens_per_chunk
        self._timeout_s = request_timeout_s

    async def sample_group(self, uid: str, prompt_ids: Sequence[int], *, group_size: int) -> list[PartialAnswer]:
        """Sample `group_size` answers to one prompt.

        Raises:
            GenerationFailedError: if no chunk could be had for `request_timeout_s`.
        """
        answers = [PartialAnswer(max_new_tokens=self._sampling.max_new_tokens) for _ in range(group_size)]
        failed_url = ""
        last_progress = time.monotonic()
        while unfinished := [answer for answer in answers if not answer.finished]:
            if time.monotonic() - last_progress > self._timeout_s:
                raise GenerationFailedError(
                    f"no generation server took prompt {uid} further for {self._timeout_s:.0f} s "
                    f"(last tried: {failed_url or 'none'})"
                )
            route = await self._route(uid, self._chunk * len(unfinished), failed_url)
            if route is None:
                await asyncio.sleep(_RETRY_PAUSE_S)
                continue
            before = sum(len(answer.output_ids) for answer in unfinished)
            failed_url = "" if await self._one_chunk(route, prompt_ids, unfinished) else route.url
            if sum(len(answer.output_ids) for answer in unfinished) > before or all(a.finished for a in unfinished):
                last_progress = time.monotonic()
        return answers

    async def _one_chunk(self, route: Route, prompt_ids: Sequence[int], answers: list[PartialAnswer]) -> bool:
        """Ask one server for the next tokens of `answers`; False if it failed."""
        asked = min(self._chunk, min(answer.remaining for answer in answers))
        body: dict[str, Any] = {
            "input_ids": [[*prompt_ids, *answer.output_ids] for answer in answers],
            "sampling_params": {
                "max_new_tokens": asked,
                "temperature": self._sampling.temperature,
                "top_p": self._sampling.top_p,
                "top_k": self._sampling.top_k,
                "stop_token_ids": self._stop_token_ids,
            },
            "return_logprob": True,
        }
        try:
            async with self._session.post(
                f"{route.url}/generate", json=body, timeout=aiohttp.ClientTimeout(total=self._timeout_s)
            ) as response:
                if response.status != 200:
                    text = (await response.text())[:500]
                    logger.warning("%s/generate answered %d: %s", route.url, response.status, text)
                    await asyncio.sleep(_RETRY_PAUSE_S)
                    return False
                chunks = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("%s/generate failed: %s", route.url, error or type(error).__name__)
            await asyncio.sleep(_RETRY_PAUSE_S)
            return False
        return _take_in(chunks, answers, route)


def _take_in(chunks: Any, answers: list[PartialAnswer], route: Route) -> bool:
    if not isinstance(chunks, list) or len(chunks) != len(answers):
        logger.warning("%s/generate answered something else than %d replies", route.url, len(answers))
        return False
    try:
        for answer, chunk in zip(answers, chunks, strict=True):
            answer.extend(chunk)
    except MalformedChunkError as error:
        logger.warning("%s: %s", route.url, error)
        return False
    return True
