"""What a program in a sandbox cannot do, as this user, and where that is root, as an ordinary one too."""

import asyncio
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.workers.sandbox.base import Limits, Result, SandboxError
from corral.workers.sandbox.bubblewrap import Bubblewrap
from tests.workers.sandbox.escapes import ESCAPES, SECRET, Escape
from tests.workers.sandbox.processes import DEADLINE_S, processes_with, wait_until

ROOT = Path(__file__).parents[3]
PYTHON = (sys.executable, "-I", "-c")
SIBLING = "import time\nfor _ in range(20): time.sleep(0.01)\nopen('x', 'wb').write(bytes(1 << 20)); print('unharmed')"


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """What listens outside: on a port, by an abstract name, and at a path."""
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        name = secrets.token_hex(4)
        abstract.bind(f"\0{name}")
        named.bind(f"{tmp_path}/{name}")
        for listener in (abstract, named):
            listener.listen()
        yield port, abstract, named


@pytest.mark.parametrize("name", ESCAPES)
def test_no_program_gets_out_harms_its_sibling_or_stays(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listeners: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    monkeypatch.setenv("CORRAL_KEY", SECRET)
    (tmp_path / "key").write_text(SECRET)
    escape, word = ESCAPES[name], secrets.token_hex(8)
    program = escape.program
    here = {"parent": os.getpid(), "port": listeners[0].getsockname()[1], "folder": tmp_path}
    here["socket"] = Path(listeners[2].getsockname()).name
    for key, value in here.items():
        program = program.replace(f"{{{key}}}", str(value))
    hostile, sibling = asyncio.run(_side_by_side(program, escape, word))
    assert escape.ends(hostile), hostile
    assert sibling.stdout == b"unharmed\n", sibling
    assert not processes_with(word)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["key", str(here["socket"])])
    for listener in listeners:
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


async def _side_by_side(program: str, escape: Escape, word: str) -> tuple[Result, Result]:
    async with await Bubblewrap.create() as sandbox, await Bubblewrap.create() as other:
        hostile, sibling = await asyncio.gather(
            sandbox.exec([*PYTHON, program, word], timeout_s=escape.timeout_s, limits=escape.limits),
            other.exec([*PYTHON, SIBLING, word], timeout_s=DEADLINE_S),
        )
        assert not processes_with(word), "a result means that nothing is left"
        return hostile, sibling


def test_what_is_cancelled_or_closed_leaves_nothing() -> None:
    word = secrets.token_hex(8)
    sleeping = [*PYTHON, "import os, time; os.fork(); print(1, flush=True); time.sleep(10000)", word]

    async def run() -> None:
        sandbox = await Bubblewrap.create()
        async with sandbox:
            task = asyncio.create_task(sandbox.exec(sleeping, timeout_s=DEADLINE_S))
            await asyncio.to_thread(wait_until, lambda: len(processes_with(word)) >= 2, "it did not begin")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not processes_with(word)
            task = asyncio.create_task(sandbox.exec(sleeping, timeout_s=DEADLINE_S))
            await asyncio.to_thread(wait_until, lambda: len(processes_with(word)) >= 2, "it did not begin")
        with pytest.raises(SandboxError, match="closed while"):
            await task
        assert not processes_with(word)
        with pytest.raises(SandboxError, match="the sandbox is closed"):
            await sandbox.exec(["true"], timeout_s=DEADLINE_S)

    asyncio.run(run())


STARTER = """
import asyncio, sys
from corral.workers.sandbox.bubblewrap import Bubblewrap

async def main():
    async with await Bubblewrap.create() as sandbox:
        print("made", flush=True)
        await sandbox.exec(["sleep", sys.argv[1]], timeout_s=600.0)

asyncio.run(main())
"""


def test_a_worker_that_is_killed_at_any_moment_leaves_nothing() -> None:
    word = f"9{secrets.randbelow(10**12):012}"
    for number in range(5):  # while bwrap makes the sandbox, and when it has
        command = [sys.executable, "-c", STARTER, word]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            try:
                assert worker.stdout.readline() == b"made\n"
                if number == 0:
                    wait_until(
                        lambda: any(line.startswith("sleep\0") for line in processes_with(word).values()),
                        "it did not begin",
                    )
                time.sleep(random.uniform(0.0, 0.06) if number else 0.0)
            finally:
                worker.send_signal(signal.SIGKILL)
        wait_until(lambda: not processes_with(word), "something outlived it")


def test_processes_are_counted_by_sandbox_and_not_by_user() -> None:
    forks = "import os, time\nfor _ in range(12):\n    if not os.fork(): time.sleep(0.5); os._exit(0)\nprint('all')"

    async def run() -> list[Result]:
        async with await Bubblewrap.create() as sandbox:
            limits = Limits(processes=16)
            runs = [sandbox.exec([*PYTHON, forks], timeout_s=DEADLINE_S, limits=limits) for _ in range(3)]
            return await asyncio.gather(*runs)

    assert [result.stdout for result in asyncio.run(run())] == [b"all\n"] * 3


# An ordinary user's sandboxes are made in another way than root's, so root has all of these run by one too. What only
# root can reach, such as a Python in its home, is put below an open folder of the same name, for these processes alone.
_AS_NOBODY = """
set -e
work=/sys
mount -t tmpfs -o mode=0755 tmpfs "$work"
number=0
for path; do
    mkdir "$work/$number"; mount --rbind "$path" "$work/$number"; number=$((number + 1))
done
number=0
for path; do
    above=$(dirname "$path")
    while [ "$above" != / ]; do
        setpriv --reuid=65534 --regid=65534 --clear-groups test -x "$above" || closed=$above
        above=$(dirname "$above")
    done
    [ -z "$closed" ] || mount -t tmpfs -o mode=0755 tmpfs "$closed"
    [ -d "$path" ] || { mkdir -p "$path"; mount --rbind "$work/$number" "$path"; }
    closed=
    number=$((number + 1))
done
mkdir -m 0777 "$work/tmp"
export HOME=/nonexistent TMPDIR="$work/tmp" PYTHONDONTWRITEBYTECODE=1
cd "$CHECKOUT"
exec setpriv --reuid=65534 --regid=65534 --clear-groups "$PYTHON" -m pytest -q -p no:cacheprovider -p no:xdist "$TESTS"
"""

if os.geteuid() == 0:

    def test_it_is_so_for_an_ordinary_user_too() -> None:
        folders = dict.fromkeys(
            [sys.base_prefix, sys.prefix, str(ROOT), *(path for path in sys.path if os.path.isdir(path))]
        )
        environment = os.environ | {"CHECKOUT": str(ROOT), "PYTHON": sys.executable, "TESTS": __file__}
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
            environment.pop(name, None)
        run = subprocess.run(
            ["unshare", "--mount", "/bin/sh", "-c", _AS_NOBODY, "nobody", *folders],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert run.returncode == 0 and f"{len(ESCAPES) + 3} passed" in run.stdout, run.stdout[-5000:] + run.stderr
