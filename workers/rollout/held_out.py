"""HeldOutProblems: groups that nothing is learned from, made as all others are, with a sampling of their own.

    problem ──► GroupMaker ──► judged answers ──► sums over them, the versions that made them
                    └── failed on every try: unjudged, and left out of the means

Rollout workers and jobs of rl-eval ask generation servers, model workers the model that they hold.

The seeds of an answer follow from its row alone, so that two versions are compared on the same random numbers.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace

from corral.experiments.config.condition import last_found
from corral.experiments.config.data import EvaluationConfig
from corral.experiments.datasets.row_parser import DatasetRow
from corral.workers.data.answer_seed import AnswerSeeds
from corral.workers.data.held_out import sums_of
from corral.workers.episodes.trajectories import reward_parts_of
from corral.workers.requests.manager_messages import Answered, HeldOutProblem
from corral.workers.rollout.group_maker import AnswerClient, GroupMaker, PromptFailedError

logger = logging.getLogger(__name__)


class HeldOutProblems:
    """The held-out problems of a trial."""

    def __init__(
        self,
        config: EvaluationConfig,
        rows: Mapping[str, Mapping[str, DatasetRow]],
        groups: GroupMaker,
        client: AnswerClient,
        *,
        seed: int,
    ) -> None:
        """
        Args:
            rows: by name of the data set.
            groups: makes the groups that are trained on.
            client: samples as `config` says.
            seed: of the trial.
        """
        self._config, self._seed = config, seed
        changes = {"sampling": config.sampling, "spare_answers": 0, "demonstrations": None}
        self._groups = {
            name: replace(
                groups,
                client=client,
                rows=of_set,
                config=groups.config.model_copy(update=changes),
                group_size=config.answers_per_problem,
                max_prompt_tokens=config.dataset.max_prompt_tokens,
                takes_temperatures=False,
            )
            for name, of_set in rows.items()
        }

    async def answer(self, problem: HeldOutProblem) -> Answered:
        """What comes out of one of them.

        Raises:
            UserCodeError, HostError: as `GroupMaker.attempt`.
        """
        num_asked, groups = self._config.answers_per_problem, self._groups[problem.dataset]
        seeds = AnswerSeeds(self._seed, problem.row_id, 0)
        try:
            episodes = (await groups.attempt(problem.uid, problem.row_id, seeds)).episodes
        except PromptFailedError as error:
            logger.warning("the answers to held-out problem %s are left out of the means: %s", problem.uid, error)
            return Answered(problem=problem, sums=sums_of([], [], asked=num_asked), failure=str(error))
        lengths = [sum(len(answer.output_ids) for answer in episode.answers) for episode in episodes]
        versions = {span.version for episode in episodes for answer in episode.answers for span in answer.spans}
        votes = None
        if pattern := self._config.vote:  # what the last answer of each says, without white space around it
            last = [episode.answers[-1].output_ids if episode.answers else [] for episode in episodes]
            found = [last_found(pattern, groups.judge.text_of(ids)) for ids in last]
            votes = [one and one.strip() for one in found]
        right = [self._config.is_correct(episode.reward, reward_parts_of(episode.parts)) for episode in episodes]
        rewards = [episode.reward for episode in episodes]
        sums = sums_of(rewards, lengths, are_correct=right, asked=num_asked, votes=votes)
        return Answered(problem=problem, sums=sums, versions=sorted(versions))
