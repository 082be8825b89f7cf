"""EpisodePlayer: one episode of an agent of the user's own, from its task to what the trainer can learn from.

    task ──► agent's process ⇄ model endpoint ⇄ EpisodeSession ⇄ generation servers
                  │ done                             │ log
                  └──► reward, notes, ended ─────────┴──► Played ──judge, or the agent's own reward──► JudgedEpisode

The process has the session's key, and the session the tokens: what an agent says of its turns are numbers of them.
"""

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.config.rollout import RolloutConfig, functions_of
from corral.experiments.datasets.row_parser import DatasetRow
from corral.experiments.inputs.environment_tasks import LOAD_TIMEOUT_S, host_command, host_settings
from corral.experiments.inputs.other_pythons import environment_python
from corral.experiments.prompts.chat import find_renderer
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.worker_specs import EnvironmentSpec
from corral.workers.agents.contract import Episode
from corral.workers.environments.confinement import Confinement
from corral.workers.episodes.trajectories import JudgedEpisode
from corral.workers.episodes.turn_request import RequestRefusedError
from corral.workers.model_endpoint.endpoint import ModelEndpoint
from corral.workers.rollout.episode_session import EpisodeSession
from corral.workers.rollout.generation_client import GenerationClient
from corral.workers.rollout.judging import RewardFailedError, RewardJudge, verdict_on
from corral.workers.rollout.turn_journal import EpisodeJournal, TurnJournal
from corral.workers.user_code import agents
from corral.workers.user_code.agents import Done
from corral.workers.user_code.checks import Judged
from corral.workers.user_code.children import Children, HostError, Launch, RunFailedError, RunLostError, Started
from corral.workers.user_code.host import REFUSED, UNJUDGED, Setup

logger = logging.getLogger(__name__)

_MODEL_NAME = "policy"  # by which the model endpoint calls it
_MAX_LOST = 3  # processes that end around an episode in nobody's step: then it may well be why
_ENVIRONMENT_BEAT_S = 1.0
_REASONS = {REFUSED: "request_refused", UNJUDGED: "reward_error"}


class AgentFailedError(RuntimeError):
    """An agent failed in an episode; the text is one line, with file and line where they are known."""

    def __init__(self, text: str, *, kind: str = "agent_error", traceback: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        """agent_error, reward_error or request_refused."""
        self.traceback = traceback


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that is over, before a group's judge has seen it."""

    session: EpisodeSession
    done: Done
    transcript: Episode

    def judged(self, judged: Judged) -> JudgedEpisode:
        """As the trainer gets it."""
        script, branches = self.transcript, self.session.log.branches
        return JudgedEpisode(branches, judged.reward, script.notes, script.ended, judged.statistics, judged.said)


async def open_player(
    stack: AsyncExitStack,
    config: RolloutConfig,
    judge: RewardJudge,
    prompts: PromptEncoder,
    *,
    planned: EnvironmentSpec | None = None,
    journal: TurnJournal | None = None,
    has_played: bool = False,
) -> "EpisodePlayer | None":
    """What plays the episodes of a trial's agent or environment, until the stack is closed; None for the single turn.

    Args:
        planned: what the environment was at submission.
        journal: of finished turns, where an agent that can replay is to find them again.
        has_played: whether episodes of the trial were played before.

    Raises:
        UserCodeError: if the agent or environment says why it cannot be loaded, and never was.
        HostError: if its processes end or hang while they load.
    """
    if not config.makes_episodes:
        return None
    if config.environment is not None:
        launch: Launch = _EnvironmentLaunch(config.environment, timeout_s=config.agent_timeout_s, planned=planned)
    else:
        launch = Launch(
            Setup(
                program=f"{agents.__name__}:agent",
                function=config.agent,
                name=f"agent {config.agent}",
                settings=dict(config.agent_settings),
                options={
                    "model": str(prompts.directory),
                    "template_arguments": dict(prompts.template_arguments),
                    "max_tokens": config.episode.max_tokens,
                },
                timeout_s=config.agent_timeout_s,
                setting="rollout.agent_timeout_s",
            )
        )
    children = Children(launch, hidden=judge.hidden, number=config.agent_processes)
    stack.push_async_callback(asyncio.to_thread, children.close)
    try:
        await asyncio.to_thread(children.start)
    except HostError as error:
        raise verdict_on(error, has_run=has_played) from error
    endpoint = ModelEndpoint(
        find_renderer(prompts.directory, prompts.tokenizer, arguments=prompts.template_arguments),
        prompts.tokenizer,
        vocabulary_size=prompts.vocabulary_size,
        model_name=_MODEL_NAME,
        max_model_len=config.episode.max_tokens or sys.maxsize,
    )
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-"))
    socket_path = Path(folder) / "model" / "socket"
    stack.push_async_callback(endpoint.stop)
    await endpoint.start(socket_path)
    return EpisodePlayer(
        children,
        endpoint,
        judge,
        prompts,
        config=config,
        socket_path=str(socket_path),
        journal=journal if config.episode.can_replay else None,
    )


class _EnvironmentLaunch(Launch):
    """An environment of a package, in the Python that it is installed in, without what the worker knows."""

    def __init__(self, config: EnvironmentConfig, *, timeout_s: float, planned: EnvironmentSpec | None) -> None:
        self.name, self.start_timeout_s, self.timeout_s = f"environment {config.id}", LOAD_TIMEOUT_S, timeout_s
        self.beat_s = _ENVIRONMENT_BEAT_S
        self._config, self._planned, self._python = config, planned, environment_python(config)

    def prepare(self, *, channel: int, mark: int, is_hidden: bool) -> Started:
        confinement = Confinement(self._python, variables=self._config.variables)
        settings = {"timeout_s": self.timeout_s, "parent": 0 if is_hidden else os.getpid()}
        command = host_command(self._python, "play", host_settings(self._config) | settings, f"{channel},{mark}")
        return Started(command, confinement.environment, confinement.folder, confinement.end)

    def greet(self, ready: Mapping[str, Any]) -> None:
        planned, self._planned = self._planned, None  # it is reported once
        if planned is not None and (ready["sha256"], ready["packages"]) != (planned.sha256, planned.packages):
            logger.warning(
                "%s is not what it was at submission: %s then, %s now", self.name, planned.packages, ready["packages"]
            )


@dataclass(frozen=True, slots=True)
class EpisodePlayer:
    """Plays the episodes of one rollout worker."""

    children: Children
    endpoint: ModelEndpoint
    judge: RewardJudge
    prompts: PromptEncoder
    _: KW_ONLY
    config: RolloutConfig
    socket_path: str
    """Of the endpoint."""
    journal: TurnJournal | None = None
    """Of an agent that does the same on the same answers."""

    async def play(
        self,
        uid: str,
        row: DatasetRow,
        prompt_ids: Sequence[int],
        *,
        number: int,
        client: GenerationClient,
        seed_of: Callable[[int], int],
    ) -> Played:
        """One episode.

        Args:
            number: which one of its group.
            client: asks generation servers, with the sampling that the episode has.
            seed_of: the sampling seed of a turn, by its number.

        Raises:
            AgentFailedError: if the agent fails, or nothing can be learned from what it did.
            HostError: if no process can be started for it.
            RequestRefusedError: if servers fail at one of its turns, and the agent with them.
        """
        num_lost, limits = 0, self.config.episode
        while True:
            session = EpisodeSession(
                uid,
                client,
                self.prompts.tokenizer,
                seed_of=seed_of,
                max_turns=limits.max_turns,
                max_tokens=limits.max_tokens,
                timeout_s=limits.timeout_s,
                journal=await self._kept(uid, number, client),
            )
            try:
                return await self._play(session, row, prompt_ids, number)
            except RunLostError as error:
                num_lost += not error.by_another
                if num_lost == _MAX_LOST:
                    raise AgentFailedError(f"{num_lost} processes that played it ended, the last: {error}") from error
                logger.info("an episode of prompt %s is played again: %s", uid, error)

    async def forget(self, uid: str, number: int | None = None) -> None:
        """An episode is over, or its next try is to have other answers; None is all of the prompt's."""
        if self.journal is not None:
            await self.journal.discard(uid, number)

    async def _kept(self, uid: str, number: int, client: GenerationClient) -> EpisodeJournal | None:
        """The turns of an earlier try; not of a mixture, whose experts are not kept with them."""
        return await self.journal.open(uid, number) if self.journal is not None and client.experts is None else None

    async def _play(self, session: EpisodeSession, row: DatasetRow, prompt_ids: Sequence[int], number: int) -> Played:
        async def judge(answer: str) -> float:
            if self.judge.takes_groups:
                raise RunFailedError(f"reward {functions_of(self.config.reward)} judges groups, and no single answer")
            try:
                return (await self.judge.judge_episodes(row.fields, [Episode([answer])]))[0].reward
            except RewardFailedError as error:
                raise RunFailedError(str(error)) from error

        task = {"fields": row.fields, "prompt": row.prompt, "prompt_ids": list(prompt_ids), "episode": number}
        key = self.endpoint.open_episode(session)
        try:
            address = {"unix": self.socket_path, "url": self.endpoint.url}
            asked = {"task": task, "endpoint": address, "key": key}
            done = await self.children.call(asked, Done, judge=judge)
        except RunFailedError as error:
            if session.failure is not None:
                raise session.failure from error
            kind = _REASONS.get(error.kind, "agent_error")
            raise AgentFailedError(str(error), kind=kind, traceback=error.traceback) from None
        finally:
            self.endpoint.close_episode(key)
        if session.failure is not None and not isinstance(session.failure, RequestRefusedError):
            raise session.failure  # whatever the agent made of an error of this worker
        log = session.log
        try:
            for turn, value in done.turn_rewards:
                log.reward(value, turn=turn)
            for turn in done.untrained:
                log.leave_out(turn=turn)
        except KeyError as error:
            raise AgentFailedError(f"{self.children.name} speaks of a turn {error} that was not made") from error
        if not JudgedEpisode(log.branches, 0.0).sequences():
            ended = f", and came to its limit: {session.ended}" if session.ended else ""
            raise AgentFailedError(
                f"{self.children.name} ended without an answer from which something can be learned{ended}"
            )
        turns = [self.judge.text_of(answer.output_ids) for answer in log.answers]
        return Played(session, done, Episode(turns, done.metrics, done.ended or session.ended, done.reward))
