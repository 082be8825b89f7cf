"""EpisodeSession: what one episode asks of the model, whoever plays it, and the log of it.

    agent, OpenAI program, environment ──token ids──► generate ──EpisodeLog.begin──► generation servers ──► Turn
                                                         │ limits: turns, tokens of a sequence
                                                         └── none left: EpisodeEndedError, and so is every later call

One object for all that may play: an agent's own session, the model endpoint and the packages' clients end here, so what
is trained does not depend on the door that a request came through. A finished turn is in the log, whatever comes after.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from corral.experiments.config.rollout import SamplingConfig
from corral.workers.episodes.log import EpisodeLog, Turn
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.rollout.generation_client import GenerationClient

EndReason = Literal["", "length", "turns", "time", "closed"]


class EpisodeEndedError(RuntimeError):
    """The episode has come to one of its limits: nothing more is generated for it."""

    def __init__(self, reason: EndReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """How one turn is to be sampled; None is what the trial's `sampling` says."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: Sequence[str] = ()
    """Texts that end the answer; the token that completes one is its last."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer, beside those that do anyway."""
    is_trained: bool = True
    """Whether something is to be learned from the answer. One that is sampled in another way than the trial says never
    is: the trainer's probabilities are those of the trial's sampling."""


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
    log: EpisodeLog = field(init=False)
    ended: EndReason = ""
    """The limit that it has come to."""

    def __post_init__(self) -> None:
        self.log = EpisodeLog(experts=self.client.experts)

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
            await self.client.complete(
                self.uid,
                prompt_ids,
                turn.answer,
                sampling=sampling,
                oldest_version=self.log.oldest_version,
                watch=self._stopper(request),
            )
        except BaseException:
            self.log.abandon(turn)
            raise
        length = {"max_new_tokens": sampling.max_new_tokens}
        is_as_trained = self.client.sampling.model_copy(update=length) == sampling
        self.log.finish(turn, is_trained=request.is_trained and is_as_trained)
        return turn

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
                "top_p": own.top_p if request.top_p is None else request.top_p,
                "top_k": own.top_k if request.top_k is None else request.top_k,
            }
        )

    def _stopper(self, request: TurnRequest) -> Callable[[PartialAnswer], None] | None:
        """Cuts an answer behind the first of the tokens, or the one that completes one of the texts."""
        stop_ids = set(request.stop_token_ids) - set(self.client.stop_token_ids)
        if not request.stop and not stop_ids:
            return None

        def has_stop(ids: Sequence[int]) -> bool:
            text: str = self.tokenizer.decode(list(ids)) if request.stop else ""
            return any(stop in text for stop in request.stop) or not stop_ids.isdisjoint(ids)

        def cut(answer: PartialAnswer) -> None:
            ids = answer.output_ids
            if has_stop(ids):
                answer.cut(next(end for end in range(1, len(ids) + 1) if has_stop(ids[:end])))

        return cut
