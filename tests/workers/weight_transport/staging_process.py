"""A worker of a host as a process of its own: says what it staged, and leaves, waits or is killed as it is told.

argv: host directory, trial, weights, digest, what it does once half of a version is written: "go on" or "hang"
"""

import sys
from pathlib import Path

from corral.workers.weight_transport.filling import Filling, FindSource, whole
from corral.workers.weight_transport.host_weights import HostWeights
from corral.workers.weight_transport.staging import WeightStaging


def hang(version: Filling) -> FindSource:
    """Write half of one file, and wait to be killed."""
    name = next(iter(version.manifest.files))
    (version.into / name).write_bytes((version.weights / name).read_bytes()[:1000])
    print("hangs", flush=True)
    sys.stdin.read()
    raise AssertionError("nobody killed this process")


def main() -> None:
    root, trial, weights, digest, what = sys.argv[1:]
    host = HostWeights(Path(root), trial, owner=f"generation_server/{what}")
    transport = WeightStaging(host, encode=hang if what == "hang" else whole)
    print("joined", flush=True)
    sys.stdin.readline()
    staged = transport.stage("0.1", Path(weights), digest, timeout_s=60.0)
    print(f"{staged.bytes_read} {staged.path}", flush=True)
    sys.stdin.readline()
    transport.close()


if __name__ == "__main__":
    main()
