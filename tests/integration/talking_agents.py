"""An agent for the trials here: it asks twice, and says which of its answers was the better one."""

from corral.agents import Outcome, Session, Task


async def two_turns(task: Task, session: Session) -> Outcome:
    """The second answer goes on from the first and a sign; each is judged by itself."""
    first = await session.generate()
    before = await session.judge(first)
    session.reward(0.5 * before, turn=first)
    await session.say("+")
    second = await session.generate(max_new_tokens=4)
    after = await session.judge(second)
    return Outcome(after, metrics={"gained": after - before})
