"""An environment for tests, as a package of somebody's: two questions, and a reward that writes down what it saw."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """What it is to do besides."""

    answer: str = "7"
    folder: str = ""
    """Where the reward writes what it saw."""
    does: str = ""


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """Right or wrong."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.does == "raises":
            raise KeyError("no such field")
        if self.data.folder:
            said = [message.content for branch in trace.branches for message in branch.messages]
            seen = {"said": said, "variables": dict(os.environ), "cwd": os.getcwd()}
            Path(self.data.folder, f"{self.data.id}-{trace.id}.json").write_text(json.dumps(seen))
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumTasksetConfig(vf.TasksetConfig):
    """Which tasks there are."""

    num_tasks: int = 3
    has_ids: bool = True
    is_endless: bool = False


class SumTaskset(vf.Taskset[SumTask, SumTasksetConfig]):
    """1+1=, 2+1=, ..."""

    @property
    def bounded(self) -> bool:
        return not self.config.is_endless and super().bounded

    def load(self) -> Iterator[SumTask]:
        number = 0
        while self.config.is_endless or number < self.config.num_tasks:
            number += 1
            name = f"sum-{number}" if self.config.has_ids else None
            yield SumTask(SumData(id=name, prompt=f"{number}+1=", answer=str(number + 1)), self.config.task)


class SumEnvConfig(vf.EnvConfig):
    """Who plays, and who talks to it."""

    solver: vf.AgentConfig = vf.AgentConfig()
    helper: vf.AgentConfig = vf.AgentConfig()
    questions: int = 2


class SumEnv(vf.Env[SumEnvConfig]):
    """Asks more than once."""

    async def setup(self, agents: vf.Agents) -> None:
        agents.helper.trainable = False

    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        match task.data.does:
            case "exits":
                sys.exit(3)
            case "dies":
                os._exit(3)
            case "hangs":
                await asyncio.Event().wait()
            case "helps":
                await agents.helper.run(vf.Task(vf.TaskData(prompt="9")))
        async with agents.solver.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(9 if task.data.does == "goes on" else self.config.questions - 1):
                if not segment.terminated:
                    segment = await interaction.turn("+")


__all__ = ["SumEnv", "SumTaskset"]
