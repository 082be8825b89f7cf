"""RewardJudge: calls the reward with a deadline and retries; what fails is a failure, never a reward of zero.

answers, episodes ──text──► a process of each part ──a finite number in time──► times its weight ──sum──► Judged
                                └──raised, too late, not finite, died──► next try ... ──► RewardFailedError
                                └──StopTrialError──► UserCodeError: the trial ends
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from corral.experiments.config.rollout import RewardConfig, RewardPart, part_remark
from corral.experiments.prompts.tokens import answer_text
from corral.experiments.trial.spans import Span
from corral.workers.agents.contract import Episode
from corral.workers.episodes.log import Branch
from corral.workers.episodes.trajectories import REWARD_PART, REWARD_SECONDS, JudgedEpisode
from corral.workers.lifecycle.timeline import Record, unrecorded
from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.rewards.contract import Problem
from corral.workers.streams.closing import all_or_first_error
from corral.workers.user_code import scoring
from corral.workers.user_code.checks import Judged, checked_reward
from corral.workers.user_code.children import Children, HostError, Launch, RunFailedError, RunLostError
from corral.workers.user_code.host import STOPS_TRIAL, Setup

logger = logging.getLogger(__name__)

MOST_FAILED_IN_A_ROW: Final = 16
"""Prompts. If every second one failed by itself, a run of so many would come once in 65,536 prompts."""
_MAX_LOST = 3  # processes around one call, before that counts as a try of it
_DEFAULT_PROCESSES = range(4, 17)
_SHOWN_PROBLEM = 80  # characters of it in the message of a failure


class RewardFailedError(RuntimeError):
    """A reward function failed on every try; its prompt is dropped and counted."""


def verdict_on(error: HostError, *, has_run: bool) -> RuntimeError:
    """The error that a worker ends with: it starts again, unless user code that has never run says what is wrong."""
    return UserCodeError(str(error)) if error.is_from_process and not has_run else error


def judged_answers(branches: Sequence[Branch], judged: Sequence[Judged]) -> list[JudgedEpisode]:
    """Episodes of one answer each."""
    return [
        JudgedEpisode([branch], one.reward, parts=one.statistics, said=one.said)
        for branch, one in zip(branches, judged, strict=True)
    ]


class RewardJudge:
    """Judges answers in processes, so that whatever a reward does holds up nothing else.

    Raises:
        HostError: by all that judges, if no process can be started.
    """

    def __init__(
        self,
        reward: RewardConfig,
        tokenizer: Any,
        *,
        stop_token_ids: Collection[int],
        hidden: Sequence[Path],
        record: Record = unrecorded,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            record: has how long each group has waited.
            hidden: folders that user code does not see.
            on_change: is called when `num_waiting` changes.
            stop_token_ids: a last token that is one of them is not part of the answer's text.
        """
        self.hidden = hidden
        self.num_waiting = 0
        """Groups, or episodes that are judged one by one, that wait for their reward."""
        self._record, self._on_change = record, on_change
        self._reward = reward
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._children = {name: Children(_launch(part, reward), hidden=hidden) for name, part in reward.reward.items()}

    @property
    def takes_groups(self) -> bool:
        """Whether a part judges the answers or episodes of a prompt together."""
        return any(children.start()["takes"] != "answer" for children in self._children.values())

    async def judge(self, problem: Problem, outputs: Sequence[Sequence[int]]) -> list[Judged]:
        """The rewards of a group of answers, as `judge_episodes` gives those of episodes of one answer each."""
        return await self.judge_episodes(problem, [Episode([self.text_of(output)]) for output in outputs])

    async def judge_episodes(self, problem: Problem, episodes: Sequence[Episode]) -> list[Judged]:
        """The rewards of a group of episodes, by their last answers, with the numbers of each part and the seconds that
        the group has waited for them. Everything is judged at the same time; or by one call, where a part takes groups.

        Raises:
            RewardFailedError: naming the last cause of the first one that failed.
            UserCodeError: if a part ends the trial.
            CancelledError: if the worker leaves: nothing was judged, so nothing failed, and its prompt is not dropped.
        """
        since, shown = time.monotonic(), json.dumps(problem)
        parts = [self._judge_part(name, shown, episodes) for name in self._children]
        self._count(1)
        try:
            judged = await all_or_first_error(*parts)
        finally:
            self._count(-1)
        ended = time.monotonic()
        self._record(Span(lane="rewards", name="reward", start_s=since, end_s=ended))
        seconds = {REWARD_SECONDS: ended - since}
        return [self._sum_of(each, seconds) for each in zip(*judged, strict=True)]

    def _count(self, change: int) -> None:
        self.num_waiting += change
        self._on_change()

    async def _judge_part(self, name: str, problem: str, episodes: Sequence[Episode]) -> list[Judged]:
        takes = self._children[name].start()["takes"]
        if takes == "episodes":
            texts = [json.dumps(asdict(episode)) for episode in episodes]
        else:
            texts = [episode.turns[-1] if episode.turns else "" for episode in episodes]
        groups = [[text] for text in texts] if takes == "answer" else [texts]
        asked = {"problem": problem, "is_weighed": self._reward.reward[name].weight != 0.0}
        calls = [self._try(name, asked | {"answers": group}) for group in groups]
        return [one for group in await all_or_first_error(*calls) for one in group]

    def _sum_of(self, judged: Sequence[Judged], seconds: Mapping[str, float]) -> Judged:
        """Of one episode: what each part has said of it."""
        parts, statistics, said = self._reward.reward, dict(seconds), list[str]()
        for name, one in zip(parts, judged, strict=True):
            if (size := parts[name].words) and one.said:
                said.append(part_remark(name, one.said.encode()[-size:].decode(errors="ignore")))
            statistics[f"{REWARD_PART}{name}"] = one.reward
            statistics |= {f"{REWARD_PART}{name}/{what}": value for what, value in one.statistics.items()}
        each = zip(parts.values(), judged, strict=True)
        weighted = [part.weight * one.reward for part, one in each if part.weight != 0.0]
        try:
            return Judged(checked_reward(math.fsum(weighted)), statistics, "\n".join(said))
        except (OverflowError, ValueError) as error:
            raise RewardFailedError(f"the weighted sum of {weighted}: {error}") from error

    async def _try(self, name: str, asked: Mapping[str, Any]) -> list[Judged]:
        """Of one call and, where it fails, those after it."""
        tries, cause, num_failed, num_lost = 1 + self._reward.reward_retries, "", 0, 0
        while num_failed < tries:
            traceback = ""
            try:
                judged = await self._children[name].call(asked, list[Judged])
                if len(judged) == len(asked["answers"]):
                    return judged
                raise RunFailedError("its process reported another number of rewards than there are answers")
            except RunLostError as error:
                cause = str(error)
                num_lost += not error.by_another
                num_failed += not error.by_another and num_lost > _MAX_LOST
            except RunFailedError as error:
                cause, traceback = str(error), error.traceback
                if error.kind == STOPS_TRIAL:
                    raise UserCodeError(f"reward {name}: {cause}") from error
                num_failed += 1
            logger.warning("reward %s failed on %.*s: %s\n%s", name, _SHOWN_PROBLEM, asked["problem"], cause, traceback)
        raise RewardFailedError(f"the reward function {name} failed {tries} times, last: {cause}")

    def text_of(self, output_ids: Sequence[int]) -> str:
        """An answer without the token that ended it; other special tokens are part of what the model said."""
        return answer_text(self._tokenizer, output_ids, ends=self._stop_token_ids)

    def start(self) -> None:
        """Import the rewards now, so that the first answer does not wait for them."""
        for children in self._children.values():
            children.start()

    def close(self) -> None:
        """Nothing is judged any more; what runs is ended."""
        for children in self._children.values():
            children.close()


def _launch(part: RewardPart, reward: RewardConfig) -> Launch:
    """A plain reward has a process to itself while it runs; an async reward shares a process with all other calls."""
    cpus = min(max(len(os.sched_getaffinity(0)), _DEFAULT_PROCESSES[0]), _DEFAULT_PROCESSES[-1])
    return Launch(
        Setup(
            program=f"{scoring.__name__}:reward",
            function=part.function,
            name=f"reward {part.function}",
            settings=dict(part.settings),
            options={"concurrency": part.concurrency, "num_processes": cpus},
            timeout_s=reward.reward_timeout_s,
            setting="rollout.reward_timeout_s",
        )
    )
