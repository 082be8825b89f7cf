"""A harness of verifiers that plays in the host's own process: it says what was said before, and takes the answer.

The `null` loop of verifiers starts a program for each turn, at more than a second of computing. Where a task has no
tools there is nothing that such a program does besides. Imported by the host of an environment alone, as `corral_chat`.
"""

from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult, Runtime

_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # the player of the episode has a deadline


class CorralChatConfig(vf.HarnessConfig):
    """Nothing but what all have."""


class CorralChat(vf.Harness[CorralChatConfig]):
    """One request a turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        system_prompt, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system_prompt:
            messages.append({"role": "system", "content": system_prompt})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession(timeout=_NO_TIMEOUT) as session,
            session.post(
                f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}, headers=headers
            ) as reply,
        ):
            text = await reply.text()
            return ProgramResult(exit_code=int(reply.status != 200), stdout="", stderr="" if reply.ok else text)


__all__ = ["CorralChat"]
