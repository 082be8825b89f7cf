"""GroupMaker: one prompt becomes one judged group that a train step can use, or the reason why it cannot.

    row ──encode──┬─ single turn ──► AnswerClient ──► answers ──► judge ────────┬──► group ─teachers─► sample
                  └─ agent of one's own ──► EpisodePlayer, n at a time ──► judge┘
                      │ an episode failed
                      ├── again, `rollout.reward_retries` times
                      ├── it is one of those to spare: done without
                      ├── PromptFailedError: the prompt is dropped and counted
                      ├── PromptsFailError: so many in a row failed that something else is to blame
                      └── UserCodeError: and none was ever judged: the code is

What rewards and agents do wrong ends in one of these; what others are to blame for (servers, streams) passes through.
The client asks generation servers (GenerationClient), or a model in this process (EmbeddedClient of a model worker).
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from corral.experiments.config.rollout import (
    SINGLE_TURN,
    RolloutConfig,
    SamplingConfig,
    functions_of,
    remarks_size,
    reported_parts,
)
from corral.experiments.datasets.row_parser import DatasetRow
from corral.experiments.prompts.row_prompts import Prompt, PromptEncoder
from corral.experiments.trial.log_state import DROPPED_AS_FILTERED
from corral.experiments.trial.spans import Span
from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.workers.data.answer_seed import AnswerSeeds
from corral.workers.data.prompts import BAD_ROW, GROUP_REWARD
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.data.side_numbers import finite_means
from corral.workers.data.teacher_prompts import padded_prompt
from corral.workers.episodes.log import Branch, Segment
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.episodes.stream_events import NOT_FINITE
from corral.workers.episodes.trajectories import JudgedEpisode, group_statistics, make_sample
from corral.workers.episodes.turn_request import SERVER_ERROR, RequestRefusedError
from corral.workers.lifecycle.worker import PromptsFailError, UserCodeError
from corral.workers.rewards.endpoint import EndpointDownError
from corral.workers.rollout.episode_player import AgentFailedError, EpisodePlayer, Played
from corral.workers.rollout.generation_client import GenerationClient
from corral.workers.rollout.judging import (
    MOST_FAILED_IN_A_ROW,
    RewardFailedError,
    RewardJudge,
    judged_answers,
    verdict_on,
)
from corral.workers.rollout.served_teachers import ServedTeachers, TeacherFailedError
from corral.workers.streams.closing import all_or_first_error, cancel
from corral.workers.user_code.checks import Judged
from corral.workers.user_code.children import HostError

logger = logging.getLogger(__name__)

_LIMITS = ("length", "turns", "time")  # of an episode


_MAX_REASON_LENGTH = 500  # of a dropped prompt, in the ledger
_REWARD_ERROR: Final = "reward_error"
_TEACHER_ERROR: Final = "teacher_error"


class AnswerClient(Protocol):
    """Samples the answers of groups."""

    @property
    def sampling(self) -> SamplingConfig: ...

    @property
    def experts(self) -> RoutedExpertsSpec | None:
        """Of a mixture, if answers say which experts computed each token."""

    def sampling_by(self, **changes: float) -> "AnswerClient":
        """The same client with some settings of `sampling` changed."""

    async def sample_group(
        self, uid: str, prompt_ids: Sequence[int], *, seeds: Sequence[int], enough: int | None = None
    ) -> list[PartialAnswer]:
        """One finished answer for each of `seeds`, or the first `enough` that are finished, in the order of `seeds`.

        Raises:
            RequestRefusedError: if the prompt cannot be answered.
        """


class PromptFailedError(RuntimeError):
    """A prompt is given up, or nothing is learned from it.

    Args:
        kind: why, as it is counted: bad_row, reward_error, agent_error, server_error, not_finite, filtered, ...
        statistics: of its answers, if they were judged.
    """

    def __init__(self, kind: str, message: object, *, statistics: Mapping[str, float] = MappingProxyType({})) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.statistics = kind, statistics

    @property
    def reason(self) -> str:
        """As the ledger has it."""
        return str(self)[:_MAX_REASON_LENGTH]


@dataclass(frozen=True, slots=True)
class Group:
    """The judged episodes of one prompt."""

    row: DatasetRow
    episodes: Sequence[JudgedEpisode]
    teacher_prompt: Sequence[int]
    """Ids that teachers read in the prompt's place; none of episodes, which begin as they will."""
    num_failed: int = 0
    """Others that failed, and could be spared."""


class GeneratedGroup(NamedTuple):
    """The judged answers to one prompt, as the trainer gets them."""

    episodes: Sequence[JudgedEpisode]
    sample: SequenceSample
    statistics: Mapping[str, float]


@dataclass(slots=True)
class GroupMaker:
    """Makes the groups of one worker, many at a time."""

    judge: RewardJudge
    client: AnswerClient
    prompts: PromptEncoder
    player: EpisodePlayer | None
    """None where the agent is the single turn, which needs none."""
    _: KW_ONLY
    rows: Mapping[str, DatasetRow]
    config: RolloutConfig
    group_size: int
    max_prompt_tokens: int
    num_prompts: int = MOST_FAILED_IN_A_ROW
    """Of the worker's share; if all of them fail, nothing is left to try."""
    has_judged: bool = False
    """Whether a prompt of the trial was ever judged."""
    says_reward: bool = False
    """Whether the next prompts follow from the rewards of these."""
    takes_temperatures: bool = False
    """Whether rows may say with which temperature they are sampled, and samples say it."""
    teachers: ServedTeachers | None = None
    """Outside of the trial, where there are such."""
    teacher_prompt_tokens: int = 0
    """Longest prompt of teachers' own that samples carry; 0: they carry none."""
    _failed_in_a_row: int = field(default=0, init=False)

    async def make(self, prompts: Sequence[tuple[str, str, AnswerSeeds]]) -> list["GeneratedGroup | PromptFailedError"]:
        """The groups of prompts, all made at the same time; a PromptFailedError in place of a prompt that is dropped.

        Args:
            prompts: uid, name of the row and seeds of each. Failures in a row are counted in their order.

        Raises:
            UserCodeError, PromptsFailError, HostError: the worker has to end.
        """
        made = await all_or_first_error(*(self._make_one(*prompt) for prompt in prompts))
        for (uid, _, _), one in zip(prompts, made, strict=True):
            if isinstance(one, GeneratedGroup) or one.kind == DROPPED_AS_FILTERED:
                self._failed_in_a_row, self.has_judged = 0, True
            elif one.kind != BAD_ROW:
                self._failed_in_a_row += 1
                logger.warning("prompt %s failed: %s", uid, one, exc_info=one.__cause__)
                if self._failed_in_a_row >= min(MOST_FAILED_IN_A_ROW, self.num_prompts):
                    what = f"{self._failed_in_a_row} prompts in a row failed, the last one with {one}"
                    is_of_servers = one.kind in (SERVER_ERROR, NOT_FINITE)
                    raise PromptsFailError(what) if is_of_servers else self._all_fail(what) from one.__cause__
        return made

    async def _make_one(self, uid: str, row_id: str, seeds: AnswerSeeds) -> "GeneratedGroup | PromptFailedError":
        try:
            group = await self.attempt(uid, row_id, seeds)
            episodes, source = group.episodes, group.row.source
            rewards = [episode.total for episode in episodes]
            mean = math.fsum(rewards) / len(rewards)
            of_group = {GROUP_REWARD: mean} if self.says_reward else {}
            if self.config.drop_uniform_groups and len(set(rewards)) == 1:
                text = f"the rewards of all {len(rewards)} answers are {rewards[0]:g}"
                return PromptFailedError(DROPPED_AS_FILTERED, text, statistics=of_group)
            sample, statistics = await self._sample(uid, group)
        except PromptFailedError as error:
            if self.player is not None:
                await self.player.forget(uid)
            return error
        if source:
            tokens = sum(len(answer.output_ids) for episode in episodes for answer in episode.answers)
            statistics |= {
                f"reward/source/{source}": mean,
                f"response_length/source/{source}": tokens / len(rewards),
                f"no_eos_fraction/source/{source}": float(sample.data["seq_no_eos_mask"].mean()),
            }
        return GeneratedGroup(episodes, sample, of_group | statistics)

    async def _sample(self, uid: str, group: Group) -> tuple[SequenceSample, dict[str, float]]:
        """What the trainer gets of a group, with what teachers outside of the trial say of it."""
        says_episodes, row, size = self.player is not None, group.row, self.teacher_prompt_tokens
        sample = make_sample(
            uid,
            group.episodes,
            experts=self.client.experts,
            parts=reported_parts(self.config.reward),
            remarks_bytes=remarks_size(self.config.reward, of_episodes=says_episodes),
            teacher_prompt=padded_prompt(group.teacher_prompt, size) if size else None,
            says_episodes=says_episodes,
            temperature=(row.temperature or self.client.sampling.temperature) if self.takes_temperatures else None,
        )
        statistics = group_statistics(group.episodes) | (statistics_of(group) if says_episodes else {})
        if self.teachers is None:
            return sample, statistics
        try:
            taught = await self.teachers.judge(sample, source=row.source, prompt_ids=group.teacher_prompt)
        except TeacherFailedError as error:
            raise PromptFailedError(_TEACHER_ERROR, error) from error
        except EndpointDownError as error:
            raise PromptsFailError(f"the teacher is away: {error}") from error
        return taught[0], statistics | taught[1]

    def _all_fail(self, what: str) -> RuntimeError:
        others = "" if self.teachers is None else ", or the teacher"
        agent = "" if self.config.agent == SINGLE_TURN else f"agent {self.config.agent} or "
        what += f"; mend {agent}reward {functions_of(self.config.reward)}{others}"
        if self.has_judged:
            return PromptsFailError(what)
        return UserCodeError(f"{what}, in the folder `code` of the trial if it is your own, and rl-submit --resume it")

    async def attempt(self, uid: str, row_id: str, seeds: AnswerSeeds) -> Group:
        """The judged answers of one prompt; nothing follows from how many prompts fail in a row.

        Raises:
            PromptFailedError: the prompt is dropped and counted.
            UserCodeError, HostError: the worker has to end.
        """
        try:
            row = self.rows[row_id]
            prompt_ids, demonstrations = self._ids(row, row.prompt), self._demonstrations(row)
            teacher_prompt = prompt_ids if row.teacher_prompt is row.prompt else self._ids(row, row.teacher_prompt)
        except ValueError as error:
            raise PromptFailedError(BAD_ROW, error) from error
        # Sampled at the temperature that the row says.
        own = {} if row.temperature is None or not self.takes_temperatures else {"temperature": row.temperature}
        client = self.client.sampling_by(**own)
        try:
            if self.player is None:
                # All are asked for and judged at the same time; demonstrations stand behind generated answers.
                num_generated = self.group_size - len(demonstrations)
                numbers = seeds.of_group(num_generated + self.config.spare_answers)
                answers = await client.sample_group(uid, prompt_ids, seeds=numbers, enough=num_generated)
                outputs: list[Sequence[int]] = [answer.output_ids for answer in answers]
                outputs += [branch.segments[-1].ids for branch in demonstrations]
                judged = await self.judge.judge(row.fields, outputs)
                branches = [*(Branch.of(prompt_ids, answer) for answer in answers), *demonstrations]
                return Group(row, judged_answers(branches, judged), teacher_prompt)
            assert isinstance(client, GenerationClient), "agents ask generation servers"
            episodes, num_failed = await self._episodes(self.player, client, uid, row, prompt_ids, seeds)
            await self.player.forget(uid)
            return Group(row, episodes, (), num_failed)
        except HostError as error:
            raise verdict_on(error, has_run=self.has_judged) from error
        except RewardFailedError as error:
            raise PromptFailedError(_REWARD_ERROR, error) from error
        except (AgentFailedError, RequestRefusedError) as error:
            raise PromptFailedError(error.kind, error) from error

    def _ids(self, row: DatasetRow, prompt: Prompt) -> list[int]:
        return self.prompts.encode_within(self.max_prompt_tokens, prompt, tools=row.tools)

    def _demonstrations(self, row: DatasetRow) -> list[Branch]:
        """The row's own answer, if it has one that fits, and the policy makes another to compare it with."""
        field = self.config.demonstrations
        answer = None if field is None else row.fields.get(field)
        if not isinstance(answer, str | int | float) or self.group_size < 2:
            return []
        ids, is_given = self.prompts.encode_learned(row.prompt, str(answer), tools=row.tools)
        start = is_given.index(False)
        end = is_given.index(True, start) if True in is_given[start:] else len(ids)
        if start > self.max_prompt_tokens or end - start > self.config.sampling.max_new_tokens:
            return []
        return [Branch([Segment(ids[:start]), Segment(ids[start:end], is_trained=True)])]

    async def _episodes(
        self,
        player: EpisodePlayer,
        client: GenerationClient,
        uid: str,
        row: DatasetRow,
        prompt_ids: Sequence[int],
        seeds: AnswerSeeds,
    ) -> tuple[list[JudgedEpisode], int]:
        """As many as end first, in the order of their numbers, and how many have failed; the others are given up. One
        that fails is one of these, as long as there are enough without it.
        """

        async def episode(number: int) -> tuple[int, Played, Judged]:
            played = await self._episode(player, client, uid, row, prompt_ids, seeds, number=number)
            if self.judge.takes_groups:
                return number, played, Judged(math.nan)
            if played.done.reward is not None:
                return number, played, Judged(played.done.reward)
            return number, played, (await self.judge.judge_episodes(row.fields, [played.transcript]))[0]

        num_episodes = self.group_size + self.config.spare_answers
        tasks = [asyncio.create_task(episode(number)) for number in range(num_episodes)]
        ended, num_failed = list[tuple[int, Played, Judged]](), 0
        try:
            for done in asyncio.as_completed(tasks):
                try:
                    ended.append(await done)
                except (AgentFailedError, RequestRefusedError, RewardFailedError) as error:
                    num_failed += 1
                    if num_failed > self.config.spare_answers:
                        raise
                    logger.warning("an episode of prompt %s failed, and is done without: %s", uid, error)
                if len(ended) == self.group_size:
                    break
        finally:
            await cancel(*tasks)
        ended.sort(key=lambda each: each[0])
        rewards = [reward for _, _, reward in ended]
        if self.judge.takes_groups:
            rewards = await self.judge.judge_episodes(row.fields, [played.transcript for _, played, _ in ended])
        return [played.judged(reward) for (_, played, _), reward in zip(ended, rewards, strict=True)], num_failed

    async def _episode(
        self,
        player: EpisodePlayer,
        client: GenerationClient,
        uid: str,
        row: DatasetRow,
        prompt_ids: Sequence[int],
        seeds: AnswerSeeds,
        *,
        number: int,
    ) -> Played:
        """One of a group, tried again as long as its agent fails."""
        num_episodes = self.group_size + self.config.spare_answers
        for attempt in range(1 + self.config.reward_retries):
            # What made an agent fail may be the answers, so the next try has others.
            answer = number + attempt * num_episodes

            def seed_of(turn: int, answer: int = answer) -> int:
                return seeds.of(answer, call=turn)

            started = time.monotonic()
            try:
                played = await player.play(uid, row, prompt_ids, number=number, client=client, seed_of=seed_of)
                client.record(Span(lane="episodes", name="episode", start_s=started, end_s=time.monotonic(), about=uid))
                return played
            except AgentFailedError as error:
                if error.kind != "agent_error" or attempt == self.config.reward_retries:
                    raise  # the judge has made its own tries, and a server would refuse again
                await player.forget(uid, number)
                logger.warning("the agent failed on prompt %s: %s\n%s", uid, error, error.traceback)
        raise AssertionError("the last try returns or raises")


def statistics_of(group: Group) -> dict[str, float]:
    """Means over the episodes of a group, as a step's line has those of its groups: turns, sequences, how many ended
    early by which limit or otherwise, and what agents have noted; and how many failed and were done without."""
    episodes = group.episodes
    ends = Counter(episode.ended if episode.ended in ("", *_LIMITS) else "other" for episode in episodes)
    values: dict[str, list[float]] = {
        "episode/turns": [float(len(episode.answers)) for episode in episodes],
        "episode/sequences": [float(len(episode.sequences())) for episode in episodes],
    }
    for episode in episodes:
        for name, value in episode.metrics.items():
            values.setdefault(f"notes/{name}", []).append(value)
    means = finite_means(values)
    means |= {f"episode/ended/{reason}": ends[reason] / len(episodes) for reason in (*_LIMITS, "other")}
    return means | {"episode/failed": float(group.num_failed)}
