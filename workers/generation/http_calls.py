"""Calls of a generation server's HTTP, with a key and a deadline each, and one error for all that can go wrong.

caller ──GET, POST──► server ──► text, or a JSON object
            `──► ServerError: refused, gone, or silent
"""

import json
from typing import Any

import aiohttp


class ServerError(RuntimeError):
    """A generation server refused, or did not answer in time."""


class RefusedError(ServerError):
    """It has answered, by another status than 200: it is done with what it was asked for."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


async def get_text(session: aiohttp.ClientSession, url: str, *, key: str, timeout_s: float) -> str:
    """What GET answers.

    Raises:
        RefusedError: naming the URL and what it said.
        ServerError: it said nothing, or nothing that can be read.
    """
    return await _call(session, "GET", url, None, key, timeout_s)


async def get_json(session: aiohttp.ClientSession, url: str, *, key: str, timeout_s: float) -> dict[str, Any]:
    """The object that GET answers; raises as `get_text` does, also if it is none."""
    text = await _call(session, "GET", url, None, key, timeout_s)
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise ServerError(f"{url} answered no JSON: {text[:100]!r}") from error
    if not isinstance(answer, dict):
        raise ServerError(f"{url} answered no JSON object: {text[:100]!r}")
    return answer


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any], *, key: str, timeout_s: float) -> str:
    """What POST answers; raises as `get_text` does."""
    return await _call(session, "POST", url, body, key, timeout_s)


async def _call(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None, key: str, timeout_s: float
) -> str:
    headers, timeout = {"Authorization": f"Bearer {key}"}, aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.request(method, url, json=body, headers=headers, timeout=timeout) as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reason = str(error) or f"no answer within {timeout_s:.0f} s"
        raise ServerError(f"{url} failed: {reason}") from error
    if response.status != 200:
        raise RefusedError(f"{url} answered {response.status}: {text[:500]}", status=response.status)
    return text
