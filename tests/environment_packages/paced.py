"""`adding` for a whole trial: it asks more often, takes its time, and says who was answered."""

import verifiers.v1 as vf
from adding import SumEnvConfig, SumTask, SumTaskset
from paced_turns import NUM_TURNS, after_answer


class PacedEnv(vf.Env[SumEnvConfig]):
    """The policy's answers to the task, and to a sign."""

    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        async with agents.solver.interaction(task) as interaction:
            for turn in range(NUM_TURNS):
                await interaction.turn(*["+"][:turn])
                await after_answer()


__all__ = ["PacedEnv", "SumTaskset"]
