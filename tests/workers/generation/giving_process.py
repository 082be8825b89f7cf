"""A host as a process of its own, to be killed: stages a version, says where its control server is, and gives it.

argv: folder, weights, digest of their manifest
"""

import sys
import threading
from pathlib import Path

from corral.workers.checkpoint.published_weights import PublishedWeights
from tests.workers.generation.hosts import running_hosts


def main() -> None:
    folder, weights, digest = sys.argv[1:]
    with running_hosts(Path(folder)) as hosts:
        host = hosts.add()
        hosts.stage(host, PublishedWeights(version="0.1", weights=weights, digest=digest))
        print(host.control, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
