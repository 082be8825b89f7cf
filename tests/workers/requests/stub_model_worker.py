"""A process that answers the master: `python -m ... SECRETS ENDPOINT WORKER_ID`.

TrainStep answers with its version, mfc "raise" raises, mfc "never" computes for ever.
"""

import sys
import time
from pathlib import Path

from corral.workers.requests.handler import Envelope, WorkerRequestStream
from corral.workers.requests.messages import OkReply, StatsReply, TrainStep
from tests.workers.stream_helpers import security_of


def run(envelope: Envelope) -> StatsReply:
    request = envelope.request
    assert isinstance(request, TrainStep)
    if request.mfc == "raise":
        raise ValueError("bad batch")
    while request.mfc == "never":
        time.sleep(0.1)
    return StatsReply(stats={"version": float(request.version)})


def main(secrets: str, endpoint: str, worker_id: str) -> None:
    with security_of(Path(secrets), "model_worker") as security:
        with WorkerRequestStream(
            security,
            lambda: endpoint,
            worker_id=worker_id,
            incarnation=f"process of {worker_id}",
            non_blocking=lambda request: OkReply(),
        ) as stream:
            print("ready", flush=True)
            while True:
                envelope = stream.next_blocking(timeout_s=120)
                if envelope is None:
                    return
                if not isinstance(envelope.request, TrainStep):
                    stream.reply(envelope, OkReply())
                    continue
                try:
                    stream.reply(envelope, run(envelope))
                except ValueError as error:
                    stream.reply_error(envelope, error)


if __name__ == "__main__":
    main(*sys.argv[1:])
