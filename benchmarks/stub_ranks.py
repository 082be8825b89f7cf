"""Model workers without models: each has a connection of its own and says what a rank says, without computing.

    python benchmarks/stub_ranks.py SECRETS ENDPOINT FIRST COUNT SAMPLES ANSWERS AT_ONCE

COUNT ranks from FIRST on live in this process. After each train step, and at first, SAMPLES samples of ANSWERS answers
arrive at each rank; a Fetch is told of AT_ONCE of them. When standard input is closed, one line of JSON says how many
bytes all of them have got and sent since they were initialized.
"""

import asyncio
import json
import os
import random
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.trial.secrets import TrialSecrets
from corral.workers.requests.messages import (
    Fetch,
    Hello,
    Initialize,
    MetadataReply,
    OkReply,
    ReplyPayload,
    SampleMetadata,
    ToWorker,
    TrainReply,
    TrainStep,
)
from corral.workers.streams.codec import Buffer, Message, MessageCodec
from corral.workers.streams.link import DealerLink
from corral.workers.streams.security import StreamSecurity

TRIAL = "0123456789abcdef0123456789abcdef"
_STATS = {f"ppo_actor/statistic_{number}": 0.125 * number for number in range(24)}
_MOST_RANKS = 2**16  # no two samples of a trial have the same admission number
_KEYS = ("input_ids", "prompt_mask", "old_logprobs", "versions", "rewards", "seq_no_eos_mask")


class CountingCodec(MessageCodec[ToWorker]):
    """Counts the bytes of all messages."""

    def __init__(self) -> None:
        super().__init__(ToWorker, trial_uuid=TRIAL)
        self.received_bytes = self.sent_bytes = 0

    def encode(self, body: msgspec.Struct, **more: Any) -> list[Buffer]:
        frames = super().encode(body, **more)
        self.sent_bytes += sum(map(len, frames))
        return frames

    def decode(self, frames: Sequence[Buffer]) -> Message[ToWorker]:
        self.received_bytes += sum(map(len, frames))
        return super().decode(frames)


class StubRank:
    """One rank of the trainer group."""

    def __init__(
        self, security: StreamSecurity, endpoint: str, rank: int, *, num_samples: int, num_answers: int, at_once: int
    ) -> None:
        self.codec = CountingCodec()
        self._rank = rank
        self._num_samples = num_samples
        self._num_answers = num_answers
        self._at_once = at_once
        self._random = random.Random(rank)
        self._arrived: deque[SampleMetadata] = deque()
        self._num_made = 0
        self._waiting = ""
        """Id of a Fetch that has no answer yet."""
        self.link = DealerLink(
            security,
            self.codec,
            lambda: endpoint,
            server="master_worker",
            on_message=self._receive,
            on_up=self._say_hello,
        )

    def _say_hello(self) -> None:
        hello = Hello(
            worker=f"model_worker/{self._rank}",
            incarnation="stub",
            pid=os.getpid(),
            host=f"node-{self._rank // 8}",
        )
        self.link.send(self.codec.encode(hello, epoch=0))

    def _receive(self, message: Message[ToWorker]) -> None:
        request = message.body.request
        if isinstance(request, Fetch):
            self._waiting = message.request_id
        elif isinstance(request, Initialize):
            self.codec.received_bytes = self.codec.sent_bytes = 0
            self._reply(message.request_id, OkReply())
            self._make(version="0.0")
        elif isinstance(request, TrainStep):
            did = TrainReply(stats=_STATS, num_updates=4, num_nonfinite=0) if request.reports else OkReply()
            self._reply(message.request_id, did)
            self._make(version=f"1.{request.version + 1}")
        else:
            self._reply(message.request_id, OkReply())
        self._announce()

    def _make(self, *, version: str) -> None:
        self._arrived += [self._sample(version) for _ in range(self._num_samples)]

    def _sample(self, version: str) -> SampleMetadata:
        number = self._num_made
        self._num_made += 1
        lengths = [64 + int(self._random.lognormvariate(6.5, 0.8)) for _ in range(self._num_answers)]
        return SampleMetadata(
            uid=f"0:problem-{self._rank:04}-{number:06}",
            keys=_KEYS,
            num_tokens=lengths,
            versions=(version,),
            order=number * _MOST_RANKS + self._rank,
        )

    def _announce(self) -> None:
        if self._waiting and self._arrived:
            told = [self._arrived.popleft() for _ in range(min(self._at_once, len(self._arrived)))]
            self._reply(self._waiting, MetadataReply.of(told))
            self._waiting = ""

    def _reply(self, request_id: str, payload: ReplyPayload) -> None:
        epoch = int(request_id.partition(":")[0])
        self.link.send(self.codec.encode(payload, epoch=epoch, request_id=request_id))


async def _serve(security: StreamSecurity, endpoint: str, ranks: range, **each: int) -> list[StubRank]:
    stubs = [StubRank(security, endpoint, rank, **each) for rank in ranks]
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), closed.set)
    await closed.wait()
    await asyncio.gather(*(stub.link.close() for stub in stubs))
    return stubs


def main(secrets: str, endpoint: str, first: str, count: str, samples: str, answers: str, at_once: str) -> None:
    """Be ranks until standard input is closed."""
    ranks = range(int(first), int(first) + int(count))
    with StreamSecurity(TrialSecrets.load(Path(secrets)), "model_worker", trial_uuid=TRIAL) as security:
        each = {"num_samples": int(samples), "num_answers": int(answers), "at_once": int(at_once)}
        stubs = asyncio.run(_serve(security, endpoint, ranks, **each))
    received, sent = sum(stub.codec.received_bytes for stub in stubs), sum(stub.codec.sent_bytes for stub in stubs)
    print(json.dumps({"received_bytes": received, "sent_bytes": sent}))


if __name__ == "__main__":
    main(*sys.argv[1:])
