"""Episodes of one answer each, as the single turn makes them."""

from collections.abc import Sequence

from corral.workers.episodes.log import Branch
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.episodes.trajectories import JudgedEpisode


def judged_answers(
    prompt_ids: Sequence[int], answers: Sequence[PartialAnswer], rewards: Sequence[float]
) -> list[JudgedEpisode]:
    """To the same prompt, with these rewards."""
    return [
        JudgedEpisode([Branch.of(prompt_ids, answer)], reward) for answer, reward in zip(answers, rewards, strict=True)
    ]
