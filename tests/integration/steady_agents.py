"""An agent for the trials here that does the same whenever the model says the same, and takes its time."""

from paced_turns import NUM_TURNS, after_answer

from corral.agents import Session, Task


async def goes_on(task: Task, session: Session) -> None:
    """Some turns, with a sign between them."""
    for turn in range(NUM_TURNS):
        if turn:
            await session.say("+")
        await session.generate(max_new_tokens=4)
        await after_answer()
