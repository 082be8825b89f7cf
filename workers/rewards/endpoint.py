"""Requests to servers outside of the trial: JSON over HTTP, with a key, a deadline and several tries.

body ──► POST {url}/{path} ──► text
             ├── down, busy, late: again after a pause, as often as may be; then EndpointDownError
             └── refused: ValueError with what it said
"""

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from corral.experiments.config.endpoint import EndpointConfig

SHOWN = 200  # characters of a reply in the message of a failure
_CONNECT_TIMEOUT_S = 10.0
_LONGEST_PAUSE_S = 30.0
_BUSY = frozenset({408, 429, *range(500, 600)})  # by which an endpoint asks to come back


class EndpointDownError(ConnectionError):
    """The endpoint did not answer on any try, or was busy."""


class _BusyError(Exception):
    def __init__(self, status: int, pause_s: float) -> None:
        super().__init__(f"status {status}")
        self.pause_s = pause_s


async def ask(
    endpoint: EndpointConfig, path: str, body: Mapping[str, Any], *, before_try: Callable[[str], None]
) -> str:
    """What it answers.

    Args:
        path: below the URL.
        before_try: called with the failure of the try before, "" before the first try.

    Raises:
        EndpointDownError: as above.
        ValueError: if it refuses the request, or its key is not to be had.
    """
    cause: Exception | None = None
    for number in range(endpoint.tries):
        if cause is not None:
            pause_s = 2.0 ** min(number - 1, 5) * random.uniform(1.0, 1.5)  # not all at the same moment
            await asyncio.sleep(min(max(pause_s, getattr(cause, "pause_s", 0.0)), _LONGEST_PAUSE_S))
        before_try("" if cause is None else _describe(cause))
        try:
            return await _post(endpoint, path, body)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, _BusyError) as error:
            cause = error
    assert cause is not None
    raise EndpointDownError(f"{endpoint.url} failed {endpoint.tries} times, last: {_describe(cause)}")


def _describe(cause: Exception) -> str:
    return f"{type(cause).__name__}: {cause}"


async def _post(endpoint: EndpointConfig, path: str, body: Mapping[str, Any]) -> str:
    key = _key(endpoint)
    timeout = aiohttp.ClientTimeout(total=endpoint.request_timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # A connection each: next to what a language model takes it is nothing, and none is left over.
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, trust_env=True) as session:
        async with session.post(f"{endpoint.url.rstrip('/')}/{path}", json=body) as response:
            if response.status in _BUSY:
                asks_for = response.headers.get("Retry-After", "")
                raise _BusyError(response.status, float(asks_for) if asks_for.isdecimal() else 0.0)
            text = await response.text(errors="replace")
    if response.status != 200:
        reply = without_key(endpoint, text)[:SHOWN]
        raise ValueError(f"{endpoint.url} refuses the request, status {response.status}: {reply}")
    return text


def without_key(endpoint: EndpointConfig, text: str) -> str:
    """What it says, for people: services repeat keys in what they say of them."""
    key = _key(endpoint)
    return text.replace(key, "***") if key else text


def _key(endpoint: EndpointConfig) -> str:
    """
    Raises:
        ValueError: naming the variable or the file, if it is not there, empty, or others can read it.
    """
    if endpoint.key.startswith("$"):
        variable = endpoint.key[1:]
        if key := os.environ.get(variable, "").strip():
            return key
        raise ValueError(f"the environment variable {variable} with the key of {endpoint.url} is not set; export it")
    if not endpoint.key:
        return ""
    path = Path(endpoint.key).expanduser()
    if path.stat().st_mode & 0o077:
        raise ValueError(f"others can read the key of {endpoint.url} in {path}; chmod 600 {path}")
    if key := path.read_text().strip():
        return key
    raise ValueError(f"the file {path} with the key of {endpoint.url} is empty")
