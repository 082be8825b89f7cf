"""Serves a page on this host's loopback, to every client that has its address.

    browser ──GET /TOKEN/──► the page ──GET /TOKEN/data, every few seconds──► what it says now

Other users of this host reach its loopback, and so do web sites in a browser that looks there under a name of theirs
(DNS rebinding). So nothing is said without the token, which is in the address alone, nor under another host's name.
"""

import asyncio
import hmac
import secrets
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from corral.experiments.trial.guarded_listener import GuardedListener
from corral.launcher.page.view import render_page

_REFRESH_S = 5.0
_IDLE_FACTOR = 10.0  # times the reading time: a long trial, which takes seconds to read, is read less often
_LOOPBACK = "127.0.0.1"
_OWN_NAMES = (_LOOPBACK, "localhost")  # an ssh tunnel's end has these, too
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer:
    """One page, with data that are read when somebody asks and those there are have become old."""

    def __init__(self, read: Callable[[], bytes], *, title: str, refresh_s: float = _REFRESH_S) -> None:
        """
        Args:
            read: the data, in JSON; it may take its time.
            refresh_s: after how long a page asks again.
        """
        self._read, self._title, self._refresh_s = read, title, refresh_s
        self._token = secrets.token_urlsafe(24)
        self._data, self._next_read_at = b"", float("-inf")
        self._reading = asyncio.Lock()
        self._guard = GuardedListener()

    async def serve(self, tell: Callable[[str, int], None], *, port: int = 0) -> None:
        """Serves until it is cancelled.

        Args:
            tell: is called with the address and its port, once both answer.
            port: to listen at; 0 is one that is free.

        Raises:
            OSError: if the port cannot be had.
        """
        app = web.Application(middlewares=[self._admit])
        app.router.add_get("/{token}/", self._page)
        app.router.add_get("/{token}/data", self._newest)
        runner = web.AppRunner(app, access_log=None)  # addresses hold the token
        await runner.setup()
        assert runner.server is not None
        try:
            listener = socket.create_server((_LOOPBACK, port))
            own = int(listener.getsockname()[1])
            self._guard.listen(listener, runner.server)
            tell(f"http://{_LOOPBACK}:{own}/{self._token}/", own)
            await asyncio.Event().wait()
        finally:
            self._guard.close()
            await runner.cleanup()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            name = urlsplit(f"//{request.host}").hostname
        except ValueError:  # "[::1" is no name of a host
            name = None
        if name not in _OWN_NAMES:
            raise web.HTTPForbidden(text="this page has no such name; open it by the address that rl-view printed\n")
        given = request.path.removeprefix("/").partition("/")[0]  # of "OPTIONS *" the path is "*"
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise web.HTTPNotFound(text="there is no such page; the address that rl-view printed is complete\n")
        self._guard.prove(request.transport)
        response = await handler(request)
        response.headers.update(_HEADERS)
        response.enable_compression()  # it may come through a thin tunnel
        return response

    async def _page(self, request: web.Request) -> web.Response:
        page = render_page(await self._fresh(), title=self._title, refresh_s=self._refresh_s)
        return web.Response(body=page, content_type="text/html", charset="utf-8")

    async def _newest(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._fresh(), content_type="application/json")

    async def _fresh(self) -> bytes:
        async with self._reading:  # however many look at once, files are read for all of them
            began_at = time.monotonic()
            if began_at >= self._next_read_at:
                try:
                    self._data = await asyncio.to_thread(self._read)
                except TimeoutError as error:
                    raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
                took_s = time.monotonic() - began_at
                self._next_read_at = time.monotonic() + max(self._refresh_s / 2, _IDLE_FACTOR * took_s)
            return self._data
