"""Another host for benchmarks of weights: a worker's real control server in a process of its own, and a plain sender.

    AnotherHost.stage(version) ──POST /stage──► worker ──GET /weights/DIGEST/FILE──► who is measured
    AnotherHost.plain_copy ◄──sendfile over TCP── the same files of the same folder, from another process, unlooked at

Both processes share this machine's cores with the receiver, and the network is its loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the worker as the tests start it

from corral.workers.checkpoint.durable_file import PIECE_BYTES  # noqa: E402
from corral.workers.checkpoint.manifest import SealedDirectory  # noqa: E402
from tests.workers.generation.servers import ADMIN_KEY, DEADLINE_S, LOOPBACK  # noqa: E402
from tests.workers.trusted import connection_to  # noqa: E402


@dataclass(frozen=True)
class AnotherHost:
    """Processes that run."""

    folder: Path
    """Its part of the host directory."""
    control: str
    """URL of its worker."""
    plain_port: int

    def stage(self, version: SealedDirectory) -> None:
        """Let it hold a version, and no other."""
        body = {"version": "0.0", "weights": str(version.path), "digest": version.digest, "timeout_s": DEADLINE_S}
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        with closing(connection_to(self.control, timeout_s=DEADLINE_S)) as connection:
            connection.request("POST", "/stage", json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        assert response.status == 200 and answer["is_held"], answer

    def plain_copy(self, names: Sequence[str], version: SealedDirectory, into: Path) -> float:
        """Seconds to copy files of the version that it holds, one after the other, each over a connection."""
        [held] = self.folder.rglob(version.digest)
        buffer, started = memoryview(bytearray(PIECE_BYTES)), time.perf_counter()
        into.mkdir()
        for name in names:
            with (
                socket.create_connection((LOOPBACK, self.plain_port), timeout=DEADLINE_S) as connection,
                open(into / name, "wb", buffering=0) as file,
            ):
                connection.sendall(f"{held / name}\n".encode())
                while size := connection.recv_into(buffer):
                    file.write(buffer[:size])
        seconds = time.perf_counter() - started
        shutil.rmtree(into)
        return seconds


@contextmanager
def another_host(host_directory: Path, version: SealedDirectory) -> Iterator[AnotherHost]:
    """Holds `version` at first."""
    folder = host_directory / f"another-host-{os.getpid()}"
    folder.mkdir()
    giver = [sys.executable, "-m", "tests.workers.generation.giving_process", str(folder), str(version.path)]
    sender = [sys.executable, str(Path(__file__))]
    with (
        subprocess.Popen([*giver, version.digest], cwd=ROOT, stdout=subprocess.PIPE, text=True) as giving,
        subprocess.Popen(sender, stdout=subprocess.PIPE, text=True) as sending,
    ):
        try:
            assert giving.stdout is not None and sending.stdout is not None
            control, port = giving.stdout.readline().strip(), int(sending.stdout.readline())
            yield AnotherHost(folder, control, port)
        finally:
            giving.kill()
            sending.kill()
            shutil.rmtree(folder)


def send_files() -> None:
    """Answers each connection with the file that it names, until it is killed."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            connection, _ = listening.accept()
            with connection, connection.makefile("r") as request, open(request.readline().strip(), "rb") as file:
                connection.sendfile(file)


if __name__ == "__main__":
    send_files()
