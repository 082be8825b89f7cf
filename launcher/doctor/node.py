"""The check of one node of the probe job, of the node itself and its network; rl-doctor judges the answers.

    python -m corral.launcher.doctor.node FOLDER RANK NUM_NODES      on each node, as one task of a step

    rank 0   binds a port on its own address --port-0.json--> rank 1 and the login node connect, and say what time it is
    rank 1   connects to rank 0
    all      answer-RANK.json, whole or not at all

Waits are short and end with "no answer": what does not work is a finding, not a failure of the probe.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from corral.experiments.own_python import own_python
from corral.experiments.trial.directory import atomic_write
from corral.experiments.trial.login_shell import low_hard_limits
from corral.launcher.files.patience import wait_until
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.trial.redis_server import find_redis_executable

DISTRIBUTION = "corral-rl"
FIRST_PORT = "port-0.json"
_WAIT_S = 15.0
_CONNECT_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.1
_MESSAGE_BYTES = 4096


# Asks the half of corral that makes sandboxes whether it can make one on this machine.

_TIMEOUT_S = 60.0  # Python from a cold file server


def why_no_sandbox() -> str:
    """The reason in words, with a way out; "" if one was made."""
    command = own_python("-m", "corral.workers.sandbox")
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)} did not end within {_TIMEOUT_S:.0f} s"
    if run.returncode == 0:
        return ""
    return run.stdout.strip() or run.stderr.strip()[-500:] or f"{' '.join(command)} ended with {run.returncode}"


def answer(folder: Path, *, rank: int, num_nodes: int) -> dict[str, Any]:
    """Everything that this node knows."""
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    client, canary = SlurmClient(timeout_s=10.0), (folder / "canary").stat()
    said: dict[str, Any] = {
        "node": node,
        "rank": rank,
        "python": sys.version.split()[0],
        "corral": version(DISTRIBUTION),
        "uid": os.getuid(),
        "canary": {"mode": canary.st_mode & 0o777, "owner": canary.st_uid},
        "runtimes": [name for name in ("apptainer", "singularity", "enroot") if shutil.which(name)],
        "sandbox_error": why_no_sandbox(),
        "limits": low_hard_limits(),
    }
    try:
        find_redis_executable()
    except FileNotFoundError as error:
        said["redis_error"] = str(error)
    try:
        address = client.node_address(node)
    except SlurmError as error:
        said["slurm_error"] = str(error)
        address = node
    said["address"] = address
    return said | (_serve(folder, address, num_nodes) if rank == 0 else _connect_to_first(folder))


def exchange(folder: Path) -> float:
    """Connects to the first node, which has said where, and asks for the time; its clock minus ours in seconds.

    Raises:
        OSError, ValueError: if nobody answers there, or somebody else.
    """
    port = json.loads((folder / FIRST_PORT).read_bytes())
    sent_at, place = time.time(), f"{port['host']}:{port['port']}"
    try:
        with socket.create_connection((port["host"], port["port"]), timeout=_CONNECT_TIMEOUT_S) as connection:
            message = json.loads(connection.recv(_MESSAGE_BYTES))
    except OSError as error:
        raise ConnectionError(f"{place}: {error}") from error
    if message["token"] != (folder / "canary").read_text().strip():
        raise ValueError(f"something else answers on {place}")
    return float(message["time"]) - (sent_at + time.time()) / 2


def _serve(folder: Path, address: str, num_nodes: int) -> dict[str, Any]:
    """Answers connections until both the other node and the login node have connected, or time is up."""
    token = (folder / "canary").read_text().strip()
    try:
        listener = socket.create_server((address, 0))
    except OSError as error:
        return {"bind_error": f"{address}: {error}"}
    with listener:
        listener.settimeout(_POLL_INTERVAL_S)
        port = {"host": address, "port": listener.getsockname()[1]}
        atomic_write(folder / FIRST_PORT, json.dumps(port).encode())
        wanted = [folder / "login-reached", *([folder / "answer-1.json"] if num_nodes > 1 else [])]
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline and not all(is_there(path) for path in wanted):
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.sendall(json.dumps({"token": token, "time": time.time()}).encode())
    return port


def _connect_to_first(folder: Path) -> dict[str, Any]:
    if not wait_until(lambda: is_there(folder / FIRST_PORT), timeout_s=_WAIT_S, pause_s=_POLL_INTERVAL_S):
        return {"peer_error": f"{FIRST_PORT} of the first node did not appear here within {_WAIT_S:.0f} s"}
    try:
        return {"peer_offset_s": exchange(folder)}
    except (OSError, ValueError) as error:
        return {"peer_error": f"{error}"}


def is_there(path: Path) -> bool:
    """Whether a file is there, asked in a way that makes network file systems look again."""
    return path.name in os.listdir(path.parent)


def _main(folder: str, rank: str, num_nodes: str) -> None:
    said = answer(Path(folder), rank=int(rank), num_nodes=int(num_nodes))
    atomic_write(Path(folder) / f"answer-{rank}.json", json.dumps(said).encode())


if __name__ == "__main__":
    _main(*sys.argv[1:])
