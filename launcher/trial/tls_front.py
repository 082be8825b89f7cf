"""What stands before a trial's Redis: TLS for whoever asks from anywhere, a Unix socket to the server behind it.

    client --TLS, proved by the trial's certificate--> front --Unix socket in a folder of mode 0700--> redis-server

A Redis is built with TLS or without; this works with either, and it listens on a socket that whoever started it keeps.
"""

import asyncio
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from corral.experiments.trial.trust import Trust

BACKLOG: Final = 4096
_HANDSHAKE_TIMEOUT_S: Final = 10.0
_CHUNK_BYTES: Final = 1 << 16


async def serve(listener: socket.socket, behind: Path, trust: Trust) -> None:
    """Forwards every connection that `listener` accepts to the Unix socket `behind`, until it is ended."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(behind)
        except OSError:
            writer.close()  # not there (yet): who asks tries again
            return
        ways = [asyncio.ensure_future(_copy(reader, inner_writer)), asyncio.ensure_future(_copy(inner_reader, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (writer, inner_writer):
            end.close()
        await asyncio.gather(*ways, return_exceptions=True)

    server = await asyncio.start_server(
        forward, sock=listener, ssl=trust.server(), ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S, backlog=BACKLOG
    )
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # one of the two has gone, and the other is closed for it
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def _main(descriptor: str, behind: str, secrets_directory: str) -> None:
    asyncio.run(serve(socket.socket(fileno=int(descriptor)), Path(behind), Trust(Path(secrets_directory))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
