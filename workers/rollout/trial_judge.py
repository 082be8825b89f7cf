"""The trial's own judge: a frozen model that some of its servers answer with, as an endpoint for rewards that ask it.

    reward's process ──POST, a key of its own──► ModelEndpoint, on loopback ──► GenerationClient ──► a judge's server
    settings {url: trial} ──► the endpoint's address, and the file with that key

Servers and the trial's keys stay the worker's: a reward reaches the endpoint of its own worker, which answers questions
and nothing else. Who asks waits as long as the reward's deadlines say; a server that is lost comes back as any does,
and the others answer meanwhile.
"""

import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corral.experiments.config.data import EvaluationSampling
from corral.experiments.config.endpoint import TRIAL, JudgeConfig
from corral.experiments.config.rollout import RewardConfig, RewardPart
from corral.experiments.inputs.model_directory import context_length
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.prompts.tokens import eos_token_ids
from corral.experiments.trial.directory import write_new_file
from corral.workers.episodes.log import Turn
from corral.workers.episodes.turn_request import TurnRequest
from corral.workers.lifecycle.timeline import unrecorded
from corral.workers.model_endpoint.endpoint import ModelEndpoint
from corral.workers.rollout.episode_session import EpisodeSession
from corral.workers.rollout.generation_client import FailedTry, GenerationClient

_NAME = "judge"


@dataclass(slots=True)
class Judges:
    """Where the servers are, as the name service says."""

    urls: Sequence[str] = field(default_factory=list)

    async def route(self, uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
        """Any of them, but for one that has just failed or is busy, if there are others; None while there is none."""
        others = [url for url in self.urls if setback is None or url != setback.url] or self.urls
        return random.choice(others) if others else None  # noqa: S311 - spreads load, protects nothing


@dataclass(slots=True)
class _Asked:
    """Answers each question by itself: nothing goes on from it, and nothing of it is kept."""

    client: GenerationClient
    tokenizer: Any
    uid: str = _NAME

    async def generate(self, prompt_ids: Sequence[int], request: TurnRequest) -> Turn:
        session = EpisodeSession(self.uid, self.client, self.tokenizer, seed_of=lambda turn: 0)
        return await session.generate(prompt_ids, request)


@asynccontextmanager
async def asking_judges(
    config: JudgeConfig, reward: RewardConfig, client: GenerationClient, judges: Judges
) -> AsyncIterator[RewardConfig]:
    """The reward, whose parts that ask the trial's judge know where and by which key, until the context ends.

    Args:
        client: asks servers of the trial.
    """
    prompts = PromptEncoder(config.path)
    longest = context_length(config.path)
    assert longest is not None, "checked before submission"
    greedy = EvaluationSampling(max_new_tokens=longest)
    asks = replace(
        client,
        route=judges.route,
        sampling=greedy,
        stop_token_ids=eos_token_ids(config.path),
        tokenizer=prompts.tokenizer,
        experts=None,
        record=unrecorded,
    )
    endpoint = ModelEndpoint(
        prompts.chat,
        prompts.tokenizer,
        vocabulary_size=prompts.vocabulary_size,
        model_name=_NAME,
        max_model_len=longest,
    )
    with tempfile.TemporaryDirectory(prefix="corral-") as folder:
        place = Path(folder) / _NAME
        await endpoint.start(place / "socket")
        try:
            key = endpoint.open_episode(_Asked(asks, prompts.tokenizer), goes_on=False)
            write_new_file(place / "key", key.encode())
            connection = {"url": f"{endpoint.url}/v1", "key": str(place / "key")}
            parts = {name: _connected(part, connection) for name, part in reward.reward.items()}
            yield reward.model_copy(update={"reward": parts})
        finally:
            await endpoint.stop()


def _connected(part: RewardPart, where: dict[str, str]) -> RewardPart:
    asks = part.settings.get("url") == TRIAL
    return part.model_copy(update={"settings": part.settings | where}) if asks else part
