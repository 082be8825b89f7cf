"""HTTP between processes of a trial: over TLS with the trial's certificate, or not at all.

serve(application) ──listens──► port          open_session(): https only, and only to who has the trial's key
        └── require_key: a client has to know a key, too, and soon (`GuardedListener`)
"""

import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
from aiohttp import web

from corral.experiments.trial.guarded_listener import GuardedListener

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _TlsConnector(aiohttp.TCPConnector):
    """Refuses every other scheme before it connects: a key is never sent in the clear."""

    allowed_protocol_schema_set = frozenset({"https"})


def open_session(
    tls: ssl.SSLContext, *, headers: Mapping[str, str] | None = None, max_connections: int = 100
) -> aiohttp.ClientSession:
    """A session for servers of the trial; to be called on the loop that uses it.

    Args:
        tls: `Trust.client()`.
        max_connections: at the same time; 0 for no limit, where the caller has one.
    """
    return aiohttp.ClientSession(headers=headers, connector=_TlsConnector(ssl=tls, limit=max_connections))


def require_key(
    key: str, refuse: Callable[[], web.StreamResponse], guard: GuardedListener
) -> Callable[..., Awaitable[web.StreamResponse]]:
    """A middleware that answers who does not send this bearer token by what `refuse` gives, and proves who does."""
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, expected):
            return refuse()
        guard.prove(request.transport)
        return await handler(request)

    return check_key


async def serve(runner: web.AppRunner, address: str, tls: ssl.SSLContext | None, guard: GuardedListener) -> str:
    """Set up and listen, until the runner is cleaned up, on a port that the system chooses; returns the URL.

    Args:
        tls: `Trust.server()`; None: in the clear, for programs of this host that know no certificate.
        guard: closes what shows no key; the application tells it who does.
    """

    async def close(_: web.Application) -> None:
        guard.close()

    runner.app.on_shutdown.append(close)
    await runner.setup()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    assert runner.server is not None
    guard.listen(listener, runner.server, tls=tls)
    host = f"[{address}]" if ":" in address else address
    return f"{'http' if tls is None else 'https'}://{host}:{port}"
