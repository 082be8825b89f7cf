"""HTTP between processes of a trial: over TLS with the trial's certificate, or not at all.

serve(application) ──listens──► port          open_session(): https only, and only to who has the trial's key
        └── require_key: whoever asks has to know a key, too
"""

import hmac
import ssl
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
from aiohttp import web

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


def require_key(key: str, refuse: Callable[[], web.StreamResponse]) -> Callable[..., Awaitable[web.StreamResponse]]:
    """A middleware that answers who does not send this bearer token by what `refuse` gives."""
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return await handler(request) if hmac.compare_digest(given, expected) else refuse()

    return check_key


async def serve(runner: web.AppRunner, address: str, tls: ssl.SSLContext) -> str:
    """Set up and listen on a port that the system chooses; returns the URL.

    Args:
        tls: `Trust.server()`.
    """
    await runner.setup()
    await web.TCPSite(runner, address, port=0, ssl_context=tls).start()
    host = f"[{address}]" if ":" in address else address
    return f"https://{host}:{runner.addresses[0][1]}"
