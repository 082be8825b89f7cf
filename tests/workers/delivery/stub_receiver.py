"""A process that receives trajectories: `python -m ... SECRETS ADDRESS_FILE INDEX SESSION OUTPUT_FILE`.

Publishes its address, and appends a line (session, uid, whether the content is right) for every record that it drains.
"""

import json
import os
import sys
import time
from pathlib import Path

from corral.workers.delivery.receiver import TrajectoryReceiver
from tests.workers.stream_helpers import LOOPBACK, security_of


def publish(address_file: Path, index: str, endpoint: str) -> None:
    addresses = json.loads(address_file.read_text()) | {index: endpoint}
    temporary = address_file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(addresses))
    temporary.rename(address_file)


def main(secrets: str, address_file: str, index: str, session: str, output_file: str) -> None:
    with security_of(Path(secrets), "model_worker") as security:
        with TrajectoryReceiver(security, address=LOOPBACK) as receiver:
            receiver.start_session(session)
            publish(Path(address_file), index, receiver.endpoint)
            with Path(output_file).open("a") as output:
                while True:
                    for header, tensors in receiver.drain(2):
                        expected = header.order
                        is_right = bool((tensors["input_ids"] == expected).all() and len(tensors["logprobs"]) == 500)
                        output.write(json.dumps([session, header.uid, is_right]) + "\n")
                        output.flush()
                    time.sleep(0.005)


if __name__ == "__main__":
    main(*sys.argv[1:])
