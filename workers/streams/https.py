"""HTTP between processes of a trial: over TLS with the trial's certificate, or not at all.

serve(application) ──listens──► port          open_session(): https only, and only to who has the trial's key
"""

import ssl
from collections.abc import Mapping

import aiohttp
from aiohttp import web


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


async def serve(runner: web.AppRunner, address: str, tls: ssl.SSLContext) -> str:
    """Set up and listen on a port that the system chooses; returns the URL.

    Args:
        tls: `Trust.server()`.
    """
    await runner.setup()
    await web.TCPSite(runner, address, port=0, ssl_context=tls).start()
    host = f"[{address}]" if ":" in address else address
    return f"https://{host}:{runner.addresses[0][1]}"
