"""Two turns with a tool, by OpenAI's client; and the same as an environment of somebody's, whose harness it is."""

from collections.abc import Iterator, Mapping
from typing import Any

from openai import AsyncOpenAI

QUESTION = "1+1?"


async def play(client: AsyncOpenAI, tool: Mapping[str, Any]) -> str:
    """Ask, do what the model asks for, and tell it; returns its last answer."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [tool]
    first = await client.chat.completions.create(model="any", messages=messages, tools=tools)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 1}')
    # As programs do: the message as it came, fields that are None and all.
    messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    second = await client.chat.completions.create(model="any", messages=messages, tools=tools)
    assert second.choices[0].finish_reason == "stop"
    return second.choices[0].message.content or ""


try:
    import verifiers.v1 as vf
except ImportError:  # where only `play` is wanted
    __all__ = ["play"]
else:

    class ToolData(vf.TaskData):
        """And the tool that is shown to the model."""

        tool: dict[str, Any]

    class ToolTask(vf.Task[ToolData, vf.State, vf.TaskConfig]):
        """One for the answer that was to come."""

        @vf.reward
        async def right(self, trace: vf.Trace) -> float:
            return float(trace.last_reply == "It is zz2.")

    class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
        """Tasks are rows of the test."""

        def load(self) -> Iterator[ToolTask]:
            yield from ()

    class PlainHarness(vf.Harness[vf.HarnessConfig]):
        """Plays in the host's process."""

        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: vf.ModelContext,
            trace: vf.Trace,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: ToolData,
        ) -> Any:
            from verifiers.v1.runtimes import ProgramResult

            async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
                await play(client, data.tool)
            return ProgramResult(exit_code=0, stdout="", stderr="")

    __all__ = ["PlainHarness", "ToolTaskset"]
