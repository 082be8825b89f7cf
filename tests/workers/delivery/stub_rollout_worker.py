"""A process that delivers trajectories: `python -m ... SECRETS ADDRESS_FILE NAME COUNT`.

Its spool is in memory: record i of a worker always has the same content. It ends when it is killed.
"""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from corral.workers.delivery.messages import TrajectoryHeader, delivery_id
from corral.workers.delivery.sender import TrajectorySender
from corral.workers.streams.codec import Tensors
from tests.workers.delivery.memory_spool import MemorySpool
from tests.workers.stream_helpers import security_of


def payload(index: int) -> Tensors:
    return {"input_ids": np.full(500, index, np.int32), "logprobs": np.full(500, index / 8, np.float32)}


async def deliver(secrets: str, address_file: str, name: str, count: str) -> None:
    with security_of(Path(secrets), "rollout_worker") as security:
        spool = MemorySpool()
        for index in range(int(count)):
            uid = delivery_id(f"0:{name}-{index}", index)
            header = TrajectoryHeader(uid=uid, dataset_epoch=0, order=index, num_answers=1, status="finished")
            spool.fill(header, payload(index), trial_uuid=security.trial_uuid)
        async with TrajectorySender(security, spool, on_verdict=lambda uid, kind: None) as sender:
            while True:
                addresses = json.loads(Path(address_file).read_text())
                sender.set_receivers({int(index): address for index, address in addresses.items()})
                await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(deliver(*sys.argv[1:]))
