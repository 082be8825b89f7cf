"""A server of SGLang that cannot read new weights: what it does before it makes another token.

A server of the same HTTP calls stands for SGLang: its loads go as the test says, and it keeps what it was told.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from corral.workers.generation.backend import NewWeights
from corral.workers.generation.held_weights import HeldWeights, Probe
from corral.workers.generation.server_client import ServerError, SglangClient
from corral.workers.generation.sglang import SglangBackend
from corral.workers.streams.https import open_session
from tests.workers.generation.servers import LOOPBACK, access, server_spec
from tests.workers.trusted import trust

Load = Literal["succeeds", "fails", "hangs", "loads nothing", "loads others", "loads nothing and hides it"]
"""What becomes of one; the last three are acknowledged."""


class Server:
    """Loads as `loads` says, in turn, and then succeeds; `calls` is what it was told, in order."""

    def __init__(self, loads: list[Load], folder: Path) -> None:
        self.loads, self.calls = loads, list[str]()
        self.others = folder / "others"
        self.version, self.path = "0.1", folder / "old"
        self.held, self.is_hiding = self.path, False

    async def answer(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix("/")
        body: dict[str, Any] = json.loads(await request.read() or "{}")
        if name == "model_info":
            return web.json_response({"weight_version": self.version, "model_path": str(self.path)})
        if name == "weights_checker":
            ranks = [{"checksums": Probe.of(self.held).fingerprints}]
            return web.Response(status=404) if self.is_hiding else web.json_response({"ranks": ranks})
        if name != "update_weights_from_disk":
            self.calls.append(name)
            return web.Response()
        self.calls.append(f"load {body['weight_version']}")
        outcome = self.loads.pop(0) if self.loads else "succeeds"
        if outcome == "hangs":
            await asyncio.Event().wait()
        if outcome == "fails":
            return web.Response(status=400, text="Failed to update weights")
        self.version, self.path = body["weight_version"], Path(body["model_path"])
        self.held = {"succeeds": self.path, "loads others": self.others}.get(outcome, self.held)
        self.is_hiding |= outcome == "loads nothing and hides it"
        return web.Response()


def update(
    folder: Path, loads: list[Load], *, then: Callable[[SglangBackend, NewWeights], Awaitable[None]] | None = None
) -> tuple[list[str], str | None]:
    """What a server that holds 0.1 is told while it is brought to 0.2, and the error."""

    for number, name in enumerate(("old", "new", "others")):
        (folder / name).mkdir()
        save_file({"model.norm.weight": torch.full((4,), float(number))}, folder / name / "model.safetensors")

    async def run() -> tuple[list[str], str | None]:
        server = Server(loads, folder)
        application = web.Application()
        application.add_routes([web.route("*", "/{name}", server.answer)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, 0, ssl_context=trust().server()).start()
        url = f"https://{LOOPBACK}:{runner.addresses[0][1]}"
        async with open_session(trust().client()) as session:
            backend = backend_at(url, folder, session)
            new = NewWeights(
                version="0.2",
                directory=folder / "new",
                mode="retract",
                timeout_s=1.0,
                held=HeldWeights(backend.fingerprints, url, version="0.1", directory=folder / "old"),
            )
            await new.held.expect(new.directory)
            error = None
            try:
                await backend.swap(new)
            except ServerError as raised:
                error = str(raised)
            if then is not None:
                await then(backend, new)
        await runner.cleanup()
        return server.calls, error

    return asyncio.run(run())


def backend_at(url: str, folder: Path, session: aiohttp.ClientSession) -> SglangBackend:
    backend = SglangBackend(
        spec=server_spec("sglang", folder),
        access=access(),
        session=session,
        log_path=folder / "log",
        seed=1,
        start_timeout_s=1.0,
    )
    backend._client = SglangClient(session, url, api_key="a", admin_key="b")
    return backend


@pytest.mark.parametrize("load", ["fails", "loads nothing"])
def test_a_load_that_fails_once_is_repeated_before_the_server_goes_on(tmp_path: Path, load: Load) -> None:
    calls, error = update(tmp_path, [load])
    assert error is None
    assert calls == ["pause_generation", "load 0.2", "load 0.2", "abort_request", "continue_generation"]


@pytest.mark.parametrize("load, told", [("fails", "answered 400"), ("loads nothing", "holds others")])
def test_a_server_that_cannot_read_new_weights_reads_those_of_its_tag_before_it_goes_on(
    tmp_path: Path, load: Load, told: str
) -> None:
    calls, error = update(tmp_path, [load, load])
    assert error is not None and told in error
    assert calls == ["pause_generation", "load 0.2", "load 0.2", "load 0.1", "abort_request", "continue_generation"]


@pytest.mark.parametrize(
    "loads",
    [
        ["fails", "fails", "fails"],
        ["hangs"],
        ["fails", "hangs"],
        ["loads nothing", "fails", "fails"],
        ["loads others", "loads others", "loads others"],
        ["loads nothing", "loads nothing and hides it"],
    ],
    ids=", ".join,
)
def test_a_server_of_unknown_weights_never_goes_on(tmp_path: Path, loads: list[Load]) -> None:
    async def refuses(backend: SglangBackend, new: NewWeights) -> None:
        with pytest.raises(ServerError, match="is about to be started again"):
            await backend.swap(new)

    calls, error = update(tmp_path, list(loads), then=refuses)
    assert error is not None
    assert "continue_generation" not in calls
