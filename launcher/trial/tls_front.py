"""The TLS proxy of a trial's Redis: TLS for clients on any host, a Unix socket to the server behind it.

    client --TLS, proved by the trial's certificate--> front --Unix socket in a folder of mode 0700--> redis-server

A Redis is built with TLS or without; this works with either, and it listens on a socket that its parent keeps.
Strangers can use up neither its descriptors nor those of the server: what does not log in is closed soon.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from corral.experiments.trial.guarded_listener import GuardedListener
from corral.experiments.trial.trust import Trust

BACKLOG: Final = 4096
_LOGGED_IN: Final = (b"+OK", b"%", b"*")
"""How Redis begins to answer who has named the trial's user; all others hear of an error, or "+RESET"."""
_CHUNK_BYTES: Final = 1 << 16


async def serve(listener: socket.socket, behind: Path, trust: Trust) -> None:
    """Forwards every connection that `listener` accepts to the Unix socket `behind`, until it is ended."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(behind)
        except OSError:
            writer.close()  # not there (yet): who asks tries again
            return

        def look_at(answer: bytes) -> None:
            if answer.startswith(_LOGGED_IN):
                guard.prove(writer.transport)

        ways = [
            asyncio.ensure_future(_copy(reader, inner_writer)),
            asyncio.ensure_future(_copy(inner_reader, writer, look_at)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (writer, inner_writer):
            end.close()
        await asyncio.gather(*ways, return_exceptions=True)

    guard = GuardedListener()
    guard.listen(listener, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), forward), tls=trust.server())
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        guard.close()


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look_at: Callable[[bytes], None] = lambda _: None
) -> None:
    with suppress(OSError):  # one of the two has gone, and the other is closed for it
        while data := await reader.read(_CHUNK_BYTES):
            look_at(data)
            writer.write(data)
            await writer.drain()


def _main(descriptor: str, behind: str, secrets_directory: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(socket.socket(fileno=int(descriptor)), Path(behind), Trust(Path(secrets_directory))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
