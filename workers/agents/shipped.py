"""Agents that need nothing but the model and the trial's reward.

single_turn     prompt ──generate──► answer
feedback        prompt ──generate──► answer ──judge──► wrong: say so ──► generate ... until it is right, or turns end
"""

from corral.workers.agents.contract import EpisodeEndedError, Outcome, Task
from corral.workers.agents.session import Session


async def single_turn(task: Task, session: Session) -> None:
    """Ask once; `rollout.reward` judges the answer. Rollout workers do the same without a process for it."""
    await session.generate()


async def feedback(
    task: Task,
    session: Session,
    *,
    feedback: str = "\nThat is wrong. Try again.\n",
    max_turns: int = 2,
    right: float = 1.0,
) -> Outcome:
    """Ask again, with feedback, as long as `rollout.reward` says that an answer is wrong; the last one counts.

    Args:
        feedback: what is said behind a wrong answer.
        max_turns: answers at most.
        right: the reward from which on an answer is right.
    """
    turn = await session.generate()
    reward = await session.judge(turn)
    ended, num_turns = "", 1
    try:
        while reward < right and num_turns < max_turns:
            await session.say(feedback)
            turn = await session.generate()
            num_turns += 1
            reward = await session.judge(turn)
    except EpisodeEndedError as error:
        ended = error.reason
    return Outcome(reward, ended=ended)
