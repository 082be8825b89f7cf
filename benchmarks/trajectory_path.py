"""What a finished group costs from the rollout worker to the model worker: encoded, written, sent, received.

    OMP_NUM_THREADS=1 python benchmarks/trajectory_path.py [--groups 200] [--rounds 5] [--large-mb 0]

A real TrajectorySender with its spool and a TrajectoryReceiver, over a socket with CURVE, in one process.
A group is 8 answers of 2,000 tokens with the experts of 18 layers, 0.85 MB. Counted per group: encodings, fsyncs,
records read back. Its CPU milliseconds are of both ends together. Beside them, in turns, the limit: the same bytes
written and forced to disk, and sent through a pair of sockets of the same kind. `--large-mb` sends one group of that
size besides.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zmq

from corral.experiments.trial.secrets import TrialSecrets
from corral.workers.delivery.messages import TrajectoryHeader, delivery_id
from corral.workers.delivery.receiver import TrajectoryReceiver
from corral.workers.delivery.sender import TrajectorySender
from corral.workers.delivery.spool import Spool
from corral.workers.streams.codec import MessageCodec, Tensors
from corral.workers.streams.security import StreamSecurity

TRIAL = "0123456789abcdef0123456789abcdef"
LOOPBACK = "127.0.0.1"
ANSWERS, TOKENS = 8, 2000
DEADLINE_S = 300.0


def group() -> Tensors:
    num_tokens, rng = ANSWERS * TOKENS, np.random.default_rng(0)
    dtypes = {"input_ids": "int64", "logprobs": "float32", "versions": "int32", "prompt_mask": "bool"}
    made = {key: rng.integers(0, 2, num_tokens).astype(dtype) for key, dtype in dtypes.items()}
    return {**made, "experts": rng.integers(0, 128, (num_tokens, 18, 2), dtype=np.int8)}


@contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """What is encoded with tensors, forced to disk and read back, whoever does it."""
    encode, fsync, payload = MessageCodec.encode, os.fsync, Spool.payload

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += name != "encodings" or bool(kwargs.get("tensors"))
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(MessageCodec, "encode", counted("encodings", encode)),
        mock.patch.object(os, "fsync", counted("fsyncs", fsync)),
        mock.patch.object(Spool, "payload", counted("read back", payload)),
    ):
        yield


async def delivered(sender: TrajectorySender, names: range, tensors: Tensors) -> None:
    """Put these records, and wait until the receiver has acknowledged all."""
    for order in names:
        header = TrajectoryHeader(
            uid=delivery_id(f"0:{order}", order), dataset_epoch=0, order=order, num_answers=ANSWERS, status="finished"
        )
        await sender.put(header, tensors)
    deadline = time.monotonic() + DEADLINE_S
    book = sender._book
    while any(entry.receiver is None for entry in book._entries.values()) or any(
        receiver.on_its_way for receiver in book._receivers.values()
    ):
        sender.raise_failure()
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_S:.0f} s for acknowledgements")
        await asyncio.sleep(0.001)


def limit(groups: int, frames: list[bytes], folder: Path) -> float:
    """CPU seconds of writing and sending these bytes, and of nothing else."""
    context = zmq.Context()
    server_keys, client_keys = zmq.curve_keypair(), zmq.curve_keypair()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.curve_server, pull.curve_publickey, pull.curve_secretkey = True, *server_keys
    push.curve_publickey, push.curve_secretkey = client_keys
    push.curve_serverkey = server_keys[0]
    port = pull.bind_to_random_port(f"tcp://{LOOPBACK}")
    push.connect(f"tcp://{LOOPBACK}:{port}")
    start = time.process_time()
    for index in range(groups):
        with open(folder / f"raw-{index}", "wb") as file:
            for frame in frames:
                file.write(frame)
            file.flush()
            os.fsync(file.fileno())
        push.send_multipart(frames, copy=False)
        pull.recv_multipart(copy=False)
    taken = time.process_time() - start
    push.close(), pull.close(), context.term()
    return taken


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    secrets = TrialSecrets.create(folder / "secrets")
    tensors = group()
    frames = [bytes(part) for part in MessageCodec(TrajectoryHeader, trial_uuid=TRIAL).encode(
        TrajectoryHeader(uid="0:0#0", dataset_epoch=0, order=0, num_answers=ANSWERS, status="finished"),
        epoch=0, tensors=tensors,
    )]  # fmt: skip
    ours, raw, counts, wall = list[float](), list[float](), Counter[str](), list[float]()
    with (
        StreamSecurity(secrets, "model_worker", trial_uuid=TRIAL) as worker,
        StreamSecurity(secrets, "rollout_worker", trial_uuid=TRIAL) as rollout,
        TrajectoryReceiver(worker, address=LOOPBACK) as receiver,
        Spool(folder / "spool") as spool,
    ):
        receiver.start_session("1")
        async with TrajectorySender(rollout, spool, on_verdict=lambda uid, kind: None) as sender:
            sender.set_receivers({0: receiver.endpoint})
            await delivered(sender, range(1), tensors)
            for index in range(arguments.rounds):
                names = range(1 + index * arguments.groups, 1 + (index + 1) * arguments.groups)
                with counting(counts):
                    start, begun = time.process_time(), time.monotonic()
                    await delivered(sender, names, tensors)
                    ours.append(1000 * (time.process_time() - start) / arguments.groups)
                    wall.append(1000 * (time.monotonic() - begun) / arguments.groups)
                receiver.drain(arguments.groups + 1)
                await sender.remove([f"0:{order}" for order in names])
                raw.append(1000 * limit(arguments.groups, frames, folder) / arguments.groups)
            if arguments.large_mb:
                large = {"experts": np.zeros(arguments.large_mb * 2**20, np.int8)}
                begun = time.monotonic()
                await delivered(sender, range(10**6, 10**6 + 1), large)
                print(f"a group of {arguments.large_mb} MB: acknowledged after {time.monotonic() - begun:.1f} s")
    num_groups = arguments.groups * arguments.rounds
    size = sum(map(len, frames)) / 1e6
    print(
        f"per group of {size:.2f} MB: {statistics.median(ours):.2f} CPU ms, {statistics.median(wall):.2f} ms one after "
        f"the other; limit {statistics.median(raw):.2f} CPU ms, "
        f"{statistics.median(a / b for a, b in zip(ours, raw, strict=True)):.2f} x it"
    )
    each = ", ".join(f"{counts[name] / num_groups:.2f} {name}" for name in ("encodings", "fsyncs", "read back"))
    print(f"per group: {each}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large-mb", type=int, default=0)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
