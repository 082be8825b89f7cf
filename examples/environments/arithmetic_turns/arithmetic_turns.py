"""Addition in up to two turns: a wrong answer is met with how many digits are right, and the problem once more.

    12+34=  ──►  56  ──►  1=12+34=  ──►  46

An environment of verifiers as anybody writes one: it knows nothing of who trains with it. It says no letter, so that a
tokenizer of digits can read it.
"""

import random

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """One problem."""

    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """Judges the last answer; a second try is worth half."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply != self.data.answer:
            return 0.0
        return 1.0 if trace.num_turns == 1 else 0.5

    @vf.metric
    async def right_digits(self, trace: vf.Trace) -> float:
        return float(num_right(trace.last_reply, self.data.answer))


class SumTasksetConfig(vf.TasksetConfig):
    """Which problems there are."""

    first: int = 0
    """Of all sums of two two-digit numbers in an order that the seed gives, where to begin."""
    num_tasks: int = 256
    seed: int = 1


class SumTaskset(vf.Taskset[SumTask, SumTasksetConfig]):
    """Sums of two two-digit numbers."""

    def load(self) -> list[SumTask]:
        pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
        random.Random(self.config.seed).shuffle(pairs)
        chosen = pairs[self.config.first :][: self.config.num_tasks]
        return [
            SumTask(
                SumData(id=f"{left}+{right}", prompt=f"{left}+{right}=", answer=str(left + right)), self.config.task
            )
            for left, right in chosen
        ]


class SumEnvConfig(vf.EnvConfig):
    """Who plays."""

    solver: vf.AgentConfig = vf.AgentConfig()


class SumEnv(vf.Env[SumEnvConfig]):
    """Asks, says how far the answer is right, and asks once more."""

    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        async with agents.solver.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated and segment.last_reply != task.data.answer:
                right = num_right(segment.last_reply, task.data.answer)
                await interaction.turn(f"{right}={task.data.prompt}")


def num_right(given: str, answer: str) -> int:
    """Digits that are right, from the left."""
    return sum(one == other for one, other in zip(given, answer, strict=False))


__all__ = ["SumEnv", "SumTaskset"]
