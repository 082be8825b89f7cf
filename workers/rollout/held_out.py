"""HeldOutProblems: what nobody is trained on, answered by the trial's agent as prompts are, with a sampling of its own.

    problem ──row──► agent ⇄ generation servers, judge ──► sums over the answers, the versions that made them
                       └── failed on every try: unjudged, and left out of the means

The seeds of an answer follow from its row alone, so that two versions are compared on the same random numbers.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace

from corral.experiments.config.condition import last_found
from corral.experiments.config.data import EvaluationConfig
from corral.experiments.datasets.row_parser import DatasetRow, RowError
from corral.workers.data.answer_seed import AnswerSeeds
from corral.workers.data.held_out import sums_of
from corral.workers.episodes.trajectories import JudgedEpisode, reward_parts_of
from corral.workers.requests.manager_messages import Answered, HeldOutProblem
from corral.workers.rollout.group_maker import GroupMaker, PromptFailedError

logger = logging.getLogger(__name__)


class HeldOutProblems:
    """Held-out problems that a server answers."""

    def __init__(
        self, config: EvaluationConfig, rows: Mapping[str, Mapping[str, DatasetRow]], prompts: GroupMaker, *, seed: int
    ) -> None:
        """
        Args:
            rows: by name of the data set.
            prompts: makes the groups that are trained on.
            seed: of the trial.
        """
        self._rows = rows
        self._seed = seed
        self._config = config
        self._num_answers = config.answers_per_problem
        self._vote = config.vote
        self._groups = replace(
            prompts,
            client=replace(prompts.client, sampling=config.sampling, experts=None),
            config=prompts.config.model_copy(
                update={"sampling": config.sampling, "spare_answers": 0, "length_schedule": {}, "demonstrations": None}
            ),
            group_size=config.answers_per_problem,
            max_prompt_tokens=config.dataset.max_prompt_tokens,
        )

    async def answer(self, problem: HeldOutProblem) -> Answered:
        """What comes out of one of them.

        Raises:
            RewardHostError: as `GroupMaker.make`.
        """
        seeds = AnswerSeeds(self._seed, problem.row_id, 0)
        try:
            row = replace(self._rows[problem.dataset][problem.row_id], temperature=None)  # all are sampled alike
            episodes = (await self._groups.attempt(problem.uid, row, seeds)).episodes
        except (PromptFailedError, RowError) as error:
            logger.warning("the answers to held-out problem %s are left out of the means: %s", problem.uid, error)
            return Answered(problem=problem, sums=sums_of([], [], asked=self._num_answers), failure=str(error))
        lengths = [sum(len(answer.output_ids) for answer in episode.answers) for episode in episodes]
        versions = {span.version for episode in episodes for answer in episode.answers for span in answer.spans}
        votes = [self._vote_of(episode) for episode in episodes] if self._vote else None
        right = [self._config.is_correct(episode.reward, reward_parts_of(episode.parts)) for episode in episodes]
        rewards = [episode.reward for episode in episodes]
        sums = sums_of(rewards, lengths, are_correct=right, asked=self._num_answers, votes=votes)
        return Answered(problem=problem, sums=sums, versions=sorted(versions))

    def _vote_of(self, episode: JudgedEpisode) -> str | None:
        """What its last answer says, without white space around it."""
        last = episode.answers[-1].output_ids if episode.answers else []
        said = last_found(self._vote or "", self._groups.judge.text_of(last))
        return said and said.strip()
