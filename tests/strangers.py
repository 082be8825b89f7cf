"""Another user of this machine, who waits for ports and listens on those that he gets."""

import contextlib
import http.client
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import TracebackType
from typing import Self

_DEADLINE_S = 60.0
_PROGRAM = """
import os, socket, ssl, sys, threading, time
saying, context = threading.Lock(), None
if len(sys.argv) > 1:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1])
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)

def say(*words):
    with saying:
        print(*words, flush=True)

def take(wanted):
    while True:
        try:
            listener = socket.create_server(("127.0.0.1", wanted))
            break
        except OSError:
            time.sleep(0.001)
    port = listener.getsockname()[1]
    say(wanted, port)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=listen, args=(port, connection), daemon=True).start()

def listen(port, connection):
    connection.settimeout(2.0)
    heard = b""
    try:
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        heard += connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
        heard += connection.recv(65536)
    except OSError:
        pass
    say("heard", port, heard.hex())
    connection.close()

for line in sys.stdin:
    threading.Thread(target=take, args=(int(line),), daemon=True).start()
"""


class Stranger:
    """Speaks HTTP in the clear, or TLS with a certificate of his own that has the form of a trial's."""

    def __init__(self, certificate: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *filter(None, [certificate])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self.taken: dict[int, int] = {}
        """The port that he got by the one that he wanted; 0 is any."""
        self.heard: defaultdict[int, list[bytes]] = defaultdict(list)
        """What each caller of a port said first."""
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        self.want([0])

    def _listen(self, lines: Iterator[str]) -> None:
        for line in lines:
            first, *rest = line.split()
            if first == "heard":
                self.heard[int(rest[0])].append(bytes.fromhex("".join(rest[1:])))
            else:
                self.taken[int(first)] = int(rest[0])

    def everything_heard(self) -> bytes:
        return b"".join(chain(*self.heard.values()))

    def want(self, ports: Iterable[int]) -> None:
        """He takes each of them as soon as nobody has it."""
        assert self._process.stdin is not None
        self._process.stdin.writelines(f"{port}\n" for port in ports)
        self._process.stdin.flush()

    @property
    def port(self) -> int:
        """One that he has had from the start."""
        self._wait(lambda: 0 in self.taken)
        return self.taken[0]

    def wait_called(self) -> None:
        """Until somebody has called him, and has said what he had to say."""
        self._wait(lambda: any(self.heard.values()))

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def check_only_the_silent_are_closed(
    address: tuple[str, int], tls: ssl.SSLContext | None, ask: Callable[[socket.socket], None]
) -> None:
    """Who shows its key is answered, also once another connection has been closed for its silence."""

    def connect() -> socket.socket:
        plain = socket.create_connection(address, timeout=60.0)
        return plain if tls is None else tls.wrap_socket(plain)

    with connect() as used:
        ask(used)
        with connect() as silent, contextlib.suppress(ConnectionError):  # closed, too
            assert silent.recv(1) == b""
        ask(used)


def asking(path: str, key: str) -> Callable[[socket.socket], None]:
    """Gets a page, on a connection that stays."""

    def ask(connection: socket.socket) -> None:
        client = http.client.HTTPConnection("")
        client.sock = connection
        client.request("GET", path, headers={"Host": "here", "Authorization": f"Bearer {key}"})
        answer = client.getresponse()
        answer.read()
        assert answer.status not in (401, 403)
        client.sock = None  # else it is closed with the client

    return ask
