"""An environment whose tasks have a tool, on a server of its own, and which verifiers' loop for such tasks plays."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """The server."""

    TOOL_PREFIX = "adder"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class AddConfig(vf.TaskConfig):
    """Where the tool runs."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AddTask(vf.Task[vf.TaskData, vf.State, AddConfig]):
    """One for the right answer."""

    @classmethod
    def toolsets(cls, config: AddConfig) -> list[Any]:
        return [Adder(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").startswith("It is 2"))


class AddTasksetConfig(vf.TasksetConfig):
    """How many tasks."""

    count: int = 8
    task: AddConfig = AddConfig()


class AddTaskset(vf.Taskset[AddTask, AddTasksetConfig]):
    """The same question again and again."""

    def load(self) -> Iterator[AddTask]:
        for number in range(self.config.count):
            yield AddTask(vf.TaskData(id=str(number), prompt="1+1?"), self.config.task)


__all__ = ["AddTaskset"]

if __name__ == "__main__":
    Adder.run()
