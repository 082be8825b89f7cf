"""What a login shell has set for programs at large: for those of a trial it is set right."""

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from corral.experiments.trial.login_shell import proxy_exceptions

HERE = "127.0.0.1,localhost,::1"
ASK = """
import asyncio, os, sys, urllib.request
import aiohttp, httpx
from corral.experiments.trial.login_shell import leave_login_shell

leave_login_shell()
url = sys.argv[1]


async def by_aiohttp():
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as response:
        return await response.text()


for host in ("127.0.0.1", "localhost"):
    url = url.replace("127.0.0.1", host)
    print(urllib.request.urlopen(url, timeout=20).read().decode(), httpx.get(url).text, asyncio.run(by_aiohttp()))
"""


@contextmanager
def _listener(says: str, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and what it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(says.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_nothing_that_goes_to_this_machine_goes_to_a_proxy(variable: str) -> None:
    others = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with _listener("direct") as (url, asked), _listener("proxy", 503) as (proxy, seen):
        done = subprocess.run(
            [sys.executable, "-c", ASK, url],
            env={**others, variable: proxy, "NO_PROXY": "site.example"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.stdout.split() == ["direct"] * 6, done.stderr
    assert len(asked) == 6 and seen == []


@pytest.mark.parametrize(
    ("inherited", "exceptions"),
    [
        ({}, {"no_proxy": HERE, "NO_PROXY": HERE}),
        ({"no_proxy": "a,.b"}, {"no_proxy": f"a,.b,{HERE}", "NO_PROXY": f"a,.b,{HERE}"}),
        # Most clients look at the lower case first: what a user has in the upper case only is not hidden by it.
        ({"NO_PROXY": "a"}, {"no_proxy": f"a,{HERE}", "NO_PROXY": f"a,{HERE}"}),
        ({"no_proxy": "a", "NO_PROXY": "b"}, {"no_proxy": f"a,{HERE}", "NO_PROXY": f"b,{HERE}"}),
        ({"no_proxy": "*"}, {"no_proxy": "*", "NO_PROXY": "*"}),
        ({"no_proxy": "localhost"}, {"no_proxy": "localhost,127.0.0.1,::1", "NO_PROXY": "localhost,127.0.0.1,::1"}),
    ],
    ids=str,
)
def test_exceptions_stand_beside_those_of_the_user(inherited: Mapping[str, str], exceptions: Mapping[str, str]) -> None:
    assert proxy_exceptions(inherited) == exceptions
    assert proxy_exceptions(exceptions) == exceptions  # each process of a trial adds them


def test_where_a_trial_listens_is_excepted_too() -> None:
    assert proxy_exceptions({"no_proxy": "a"}, ["10.1.2.3"])["no_proxy"] == f"a,{HERE},10.1.2.3"
