"""What one node of the probe job finds out about itself and the way to others; rl-doctor judges the answers.

    python -m corral.launcher.doctor.node FOLDER RANK NUM_NODES      on each node, as one task of a step

    rank 0   binds a port on its own address --port-0.json--> rank 1 and the login node connect, and say what time it is
    rank 1   connects to rank 0
    all      answer-RANK.json, whole or not at all

Waits are short and end with "no answer": what does not work is a finding, not a failure of the probe.
"""

import argparse
import json
import os
import shutil
import socket
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from corral.experiments.trial.directory import atomic_write
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.trial.redis_server import find_redis_executable

DISTRIBUTION = "corral-rl"
_WAIT_S = 15.0
_CONNECT_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.1
_MESSAGE_BYTES = 4096


def answer(folder: Path, *, rank: int, num_nodes: int) -> dict[str, Any]:
    """Everything that this node knows."""
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    client = SlurmClient(timeout_s=10.0)
    said: dict[str, Any] = {
        "node": node,
        "rank": rank,
        "python": sys.version.split()[0],
        "corral": version(DISTRIBUTION),
        "package": str(Path(__file__).resolve().parents[1]),
        "uid": os.getuid(),
        "canary": _look_at(folder / "canary"),
        "runtimes": [name for name in ("apptainer", "singularity", "enroot") if shutil.which(name)],
    }
    try:
        said["redis"] = str(find_redis_executable())
    except FileNotFoundError as error:
        said["redis_error"] = str(error)
    try:
        address = client.node_address(node)
    except SlurmError as error:
        said["slurm_error"] = str(error)
        address = node
    said["address"] = address
    said |= _serve(folder, address, num_nodes) if rank == 0 else _connect_to_first(folder)
    return said | {"time": time.time()}


def exchange(host: str, port: int) -> tuple[str, float]:
    """Connects and asks for the time; returns the token of who answers, and its clock minus ours in seconds."""
    sent_at = time.time()
    with socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S) as connection:
        message = json.loads(connection.recv(_MESSAGE_BYTES))
    return str(message["token"]), float(message["time"]) - (sent_at + time.time()) / 2


def _serve(folder: Path, address: str, num_nodes: int) -> dict[str, Any]:
    """Answers whoever connects until both the other node and the login node have, or time is up."""
    token = (folder / "canary").read_text().strip()
    try:
        listener = socket.create_server((address, 0))
    except OSError as error:
        return {"bind_error": f"{address}: {error}"}
    with listener:
        listener.settimeout(_POLL_INTERVAL_S)
        port = {"host": address, "port": listener.getsockname()[1]}
        atomic_write(folder / "port-0.json", json.dumps(port).encode())
        finished = threading.Event()
        thread = threading.Thread(target=_reply, args=(listener, token, finished), daemon=True)
        thread.start()
        wanted = [folder / "login-reached", *([folder / "answer-1.json"] if num_nodes > 1 else [])]
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline and not all(_exists(path) for path in wanted):
            time.sleep(_POLL_INTERVAL_S)
        finished.set()
        thread.join()
    return port


def _reply(listener: socket.socket, token: str, finished: threading.Event) -> None:
    while not finished.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.sendall(json.dumps({"token": token, "time": time.time()}).encode())


def _connect_to_first(folder: Path) -> dict[str, Any]:
    deadline = time.monotonic() + _WAIT_S
    path = folder / "port-0.json"
    while not _exists(path):
        if time.monotonic() > deadline:
            return {"peer_error": f"{path.name} of the first node did not appear here within {_WAIT_S:.0f} s"}
        time.sleep(_POLL_INTERVAL_S)
    try:
        port = json.loads(path.read_text())
        token, offset_s = exchange(port["host"], port["port"])
    except (OSError, ValueError) as error:
        return {"peer_error": f"{error}"}
    return {"peer_token": token, "peer_offset_s": offset_s}


def _look_at(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {"text": path.read_text().strip(), "mode": found.st_mode & 0o777, "owner": found.st_uid}


def _exists(path: Path) -> bool:
    """Whether a file is there, asked in a way that makes network file systems look again."""
    return path.name in os.listdir(path.parent)


def main(argv: list[str] | None = None) -> int:
    """Answers for one node."""
    parser = argparse.ArgumentParser(description="One node of rl-doctor's probe.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("num_nodes", type=int)
    arguments = parser.parse_args(argv)
    said = answer(arguments.folder, rank=arguments.rank, num_nodes=arguments.num_nodes)
    atomic_write(arguments.folder / f"answer-{arguments.rank}.json", json.dumps(said).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
