"""EpisodeSession: the requests of one episode to the model, whichever agent plays it, and their log.

    agent, OpenAI program, environment ──token ids──► generate ──EpisodeLog.begin──► generation servers ──► Turn
                                                         │ limits: turns, tokens of a sequence
                                                         └── none left: EpisodeEndedError, and so is every later call

One object for all that may play: an agent's own session, the model endpoint and the packages' clients end here, so what
is trained does not depend on the door that a request came through. A finished turn is in the log, whatever comes after.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from corral.experiments.config.rollout import SamplingConfig
from corral.workers.episodes.log import EpisodeLog, Turn
from corral.workers.episodes.partial_answer import stopper
from corral.workers.episodes.turn_request import EndReason, EpisodeEndedError, RequestRefusedError, TurnRequest
from corral.workers.rollout.generation_client import GenerationClient
from corral.workers.rollout.turn_journal import EpisodeJournal, question_of


@dataclass(slots=True)
class EpisodeSession:
    """One episode of one prompt."""

    uid: str
    client: GenerationClient
    tokenizer: Any
    _: KW_ONLY
    seed_of: Callable[[int], int]
    """The sampling seed of a turn, by its number."""
    max_turns: int | None = None
    max_tokens: int | None = None
    """Of a sequence: what was given and what is made."""
    timeout_s: float | None = None
    """From now to the end of the last answer."""
    journal: EpisodeJournal | None = None
    """Of an agent that does the same on the same answers: turns that it has had before are not made again."""
    log: EpisodeLog = field(init=False)
    ended: EndReason = ""
    """The limit that it has come to."""
    failure: Exception | None = field(default=None, init=False)
    """Why a turn could not be made that is no fault of the request: no server answers it, or the worker failed."""
    _deadline: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.log = EpisodeLog(experts=self.client.experts)
        if self.timeout_s is not None:
            self._deadline = asyncio.get_running_loop().time() + self.timeout_s

    async def generate(self, prompt_ids: Sequence[int], request: TurnRequest) -> Turn:
        """The model's next answer, which is in the log from now on.

        Args:
            prompt_ids: all that it goes on from.

        Raises:
            EpisodeEndedError: if a limit leaves no room for an answer.
            RequestRefusedError: if servers find fault with the request.
        """
        sampling = self._sampling(request, num_before=len(prompt_ids))
        number = self.log.num_turns
        turn = self.log.begin(prompt_ids, max_new_tokens=sampling.max_new_tokens, sampling_seed=self.seed_of(number))
        try:
            async with asyncio.timeout_at(self._deadline) as time_is_up:
                await self._make(turn, sampling, request)
        except BaseException as error:
            self.log.abandon(turn)
            if isinstance(error, TimeoutError) and time_is_up.expired():
                raise self.end("time", f"the episode has had its {self.timeout_s:g} s") from error
            is_refused = isinstance(error, RequestRefusedError) and error.kind == "request_refused"
            if isinstance(error, Exception) and not is_refused:
                self.failure = error
            raise
        own = self.client.sampling
        self.log.finish(turn, is_trained=own.model_copy(update={"max_new_tokens": sampling.max_new_tokens}) == sampling)
        return turn

    async def _make(self, turn: Turn, sampling: SamplingConfig, request: TurnRequest) -> None:
        stops = [*request.stop, *map(str, request.stop_token_ids)]
        question = question_of(turn.prompt_ids, sampling, stops) if self.journal else b""
        if self.journal is not None and self.journal.take(question, turn.answer):
            return
        own_ids = set(request.stop_token_ids) - set(self.client.stop_token_ids)
        await self.client.complete(
            self.uid,
            turn.prompt_ids,
            turn.answer,
            sampling=sampling,
            oldest_version=self.log.oldest_version,
            watch=stopper(self.tokenizer, (*sampling.stop, *request.stop), own_ids),
        )
        if self.journal is not None:
            await self.journal.append(question, turn.answer)

    def end(self, reason: EndReason, text: str) -> EpisodeEndedError:
        """The error that says so; every later request meets it."""
        self.ended = self.ended or reason
        return EpisodeEndedError(self.ended, text)

    def _sampling(self, request: TurnRequest, *, num_before: int) -> SamplingConfig:
        """How the turn is sampled.

        Raises:
            EpisodeEndedError: if there is no room for it.
        """
        if self.ended:
            raise EpisodeEndedError(self.ended, f"the episode has ended before: {self.ended}")
        if self.max_turns is not None and self.log.num_turns >= self.max_turns:
            raise self.end("turns", f"the episode has had its {self.max_turns} turns")
        room = math.inf if self.max_tokens is None else self.max_tokens - num_before
        if room < 1:
            raise self.end(
                "length", f"{num_before} tokens leave no room for an answer: a sequence has at most {self.max_tokens}"
            )
        own = self.client.sampling
        asked = request.max_new_tokens or own.max_new_tokens
        return own.model_copy(
            update={
                "max_new_tokens": int(min(asked, own.max_new_tokens, room)),
                "temperature": own.temperature if request.temperature is None else request.temperature,
            }
        )
