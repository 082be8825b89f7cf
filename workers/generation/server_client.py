"""Calls of a server's HTTP API, with a key and a deadline each, and one error for all that can go wrong.

    caller ──GET, POST──► server ──► text, or JSON of one kind
                `──► ServerError: refused, gone, or silent

    the worker's side, how its server of SGLang takes over weights and which it holds:
    paused: pause_generation (mode) ──► load: update_weights_from_disk ──► fingerprints: weights_checker
                                                    version ◄── continue_generation ◄──┘

`retract` and `abort` leave no running request, and `load` has the cache flushed. `in_place` leaves them their keys and
values, and the cache is not flushed: a server that was asked to would refuse, after the weights have changed.
The version is what `/model_info` says: SGLang's server info keeps the one that it was started with.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from corral.experiments.config.rollout import UpdateMode
from corral.workers.streams.live_timeout import LiveTimeout

T = TypeVar("T")
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # that of each call is the caller's
Fingerprints = Mapping[str, str]
"""By the name of a tensor, as 16 hexadecimal digits."""


class ServerError(RuntimeError):
    """A generation server refused, or did not answer in time."""


class RefusedError(ServerError):
    """It has answered, by another status than 200: it is done with what it was asked for."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


async def call(
    session: aiohttp.ClientSession, url: str, *, key: str, timeout_s: float, body: Mapping[str, Any] | None = None
) -> str:
    """What GET answers, or POST of a body.

    Raises:
        RefusedError: naming the URL and what it said.
        ServerError: it said nothing, or nothing that can be read.
    """
    method, headers = "GET" if body is None else "POST", {"Authorization": f"Bearer {key}"}
    try:
        async with (
            LiveTimeout(timeout_s),
            session.request(method, url, json=body, headers=headers, timeout=_NO_TIMEOUT) as response,
        ):
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reason = str(error) or f"no answer within {timeout_s:.0f} s"
        raise ServerError(f"{url} failed: {reason}") from error
    if response.status != 200:
        raise RefusedError(f"{url} answered {response.status}: {text[:500]}", status=response.status)
    return text


def decoded(text: str, kind: type[T], *, url: str) -> T:
    """What a JSON answer says; ServerError if it is not of this kind."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise ServerError(f"{url} answered {text[:100]!r}: {error}") from error


_ANSWER_TIMEOUT_S = 5.0
_PAUSE_TIMEOUT_S = 60.0  # a pause waits for the decode step under way
_CHECK_TIMEOUT_S = 60.0  # a few tensors are hashed


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class _Checked(msgspec.Struct):
    """The answer of /weights_checker, as far as it is read."""

    ranks: list[_Rank]


class _ServerInfo(msgspec.Struct):
    """The answer of /server_info, as far as it is read."""

    max_total_num_tokens: int = 0
    """Of one of the groups of GPUs that compute attention each for their own requests."""
    internal_states: list[msgspec.Raw] = []
    """Of each of these."""


class _ModelInfo(msgspec.Struct):
    """The answer of /model_info, as far as it is read."""

    weight_version: str


class SglangClient:
    """Calls of the worker that a server of SGLang belongs to."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, api_key: str, admin_key: str) -> None:
        """
        Args:
            api_key: of those who generate.
            admin_key: for what changes the server.
        """
        self.url = url
        self._session = session
        self._api_key = api_key
        self._admin_key = admin_key

    @asynccontextmanager
    async def paused(self, mode: UpdateMode) -> AsyncIterator[None]:
        """While the block runs the server makes no token; afterwards requests go on as the mode has it.

        Guarantee: a block that raises leaves the server paused: nobody knows which weights it would go on with.

        Raises:
            ServerError: naming the call that failed.
        """
        await self._post("/pause_generation", {"mode": mode}, _PAUSE_TIMEOUT_S)
        yield
        await self._post("/continue_generation", {}, _PAUSE_TIMEOUT_S)

    async def load(self, *, version: str, weights: Path, flush_cache: bool, timeout_s: float) -> None:
        """Read other weights.

        Args:
            flush_cache: whether what the old weights computed is dropped; no request may run then.

        Raises:
            RefusedError: it could not; it may hold its old weights, the new ones, or some of both.
            ServerError: it says nothing, and may still read.
        """
        body = {"model_path": str(weights), "weight_version": version, "flush_cache": flush_cache}
        await self._post("/update_weights_from_disk", body, timeout_s)

    async def give_up_requests(self) -> None:
        """End all requests with the tokens that they have, once the server goes on."""
        await self._post("/abort_request", {"abort_all": True}, _ANSWER_TIMEOUT_S)

    async def version(self) -> str:
        """The tag of the weights that the server says it holds."""
        return decoded(await self.get("/model_info"), _ModelInfo, url=f"{self.url}/model_info").weight_version

    async def kv_tokens(self) -> int:
        """That its KV cache has room for; 0 if it does not say. Its scheduler has answered when this returns."""
        info = decoded(await self.get("/server_info"), _ServerInfo, url=f"{self.url}/server_info")
        return info.max_total_num_tokens * max(1, len(info.internal_states))

    async def fingerprints(self, *, skipped: Sequence[str]) -> list[Fingerprints]:
        """What each rank of the server computes from its tensors, but for those whose names contain one of `skipped`.

        Raises:
            ServerError: it cannot be asked, or does not answer in this form.
        """
        body = {"action": "checksum", "skip_tensor_list": list(skipped)}
        text = await self._post("/weights_checker", body, _CHECK_TIMEOUT_S)
        return [rank.checksums for rank in decoded(text, _Checked, url=f"{self.url}/weights_checker").ranks]

    async def get(self, path: str) -> str:
        """What those are answered who generate."""
        return await call(self._session, self.url + path, key=self._api_key, timeout_s=_ANSWER_TIMEOUT_S)

    async def _post(self, path: str, body: Mapping[str, object], timeout_s: float) -> str:
        return await call(self._session, self.url + path, key=self._admin_key, timeout_s=timeout_s, body=body)
