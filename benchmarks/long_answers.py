"""What a long answer costs on its way: tokens sent and prefilled for each that is made, bytes, and CPU seconds.

    OMP_NUM_THREADS=1 python benchmarks/long_answers.py [--tokens 8192] [--answers 8] [--sglang]

A group of answers to one prompt of 256 tokens, as a rollout worker asks for it, from a real server over TLS: of the
embedded engine, in this process, and of SGLang with its cache of prompts. Sent tokens are those of the requests,
prefilled ones are what the server says that it did not have in its cache; bytes are those of the bodies. CPU seconds
are those of the thread that owns the engine, or of the scheduler of SGLang; beside it those of this process for HTTP,
TLS and JSON, of the client and of the embedded server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.generation_throughput import save_random_model  # noqa: E402 - found through the line above
from benchmarks.sglang_server import KEY, serving_sglang  # noqa: E402 - as above
from corral.experiments.config.rollout import SamplingConfig  # noqa: E402
from corral.workers.engine.engine import GenerationEngine  # noqa: E402
from corral.workers.engine.server import EngineServer  # noqa: E402
from corral.workers.episodes.stream_events import stream_events  # noqa: E402
from corral.workers.rollout import generation_client  # noqa: E402
from corral.workers.rollout.generation_client import FailedTry, GenerationClient  # noqa: E402
from tests.workers.trusted import trust  # noqa: E402

PROMPT = [(7 * index) % 1000 for index in range(256)]
SILENCE_S = 600.0


@dataclass
class Bodies:
    """Of all requests of a session, and of their answers."""

    num_sent: int = 0
    num_sent_tokens: int = 0
    received: list[bytearray] = field(default_factory=list)

    def trace(self) -> aiohttp.TraceConfig:
        config = aiohttp.TraceConfig()

        async def send(session: object, context: object, event: aiohttp.TraceRequestChunkSentParams) -> None:
            self.num_sent += len(event.chunk)
            self.num_sent_tokens += len(json.loads(event.chunk)["input_ids"])

        config.on_request_chunk_sent.append(send)
        return config

    async def kept(self, pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """What comes, which is remembered."""
        self.received.append(body := bytearray())
        async for piece in pieces:
            body += piece
            yield piece

    def num_prefilled_tokens(self) -> int:
        """What the last event of each stream says."""
        metas = [json.loads(body.split(b"\n\n")[-3].removeprefix(b"data: "))["meta_info"] for body in self.received]
        return sum(meta["prompt_tokens"] - meta["cached_tokens"] for meta in metas)


async def measure(name: str, url: str, cpu_seconds: Callable[[], float], *, num_answers: int, num_tokens: int) -> None:
    """One group, and a line about it."""
    bodies = Bodies()
    generation_client.stream_events = lambda pieces: stream_events(bodies.kept(pieces))  # type: ignore[attr-defined]

    async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
        assert setback is None, setback
        return url

    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {KEY}"},
        connector=aiohttp.TCPConnector(ssl=trust().client()),
        trace_configs=[bodies.trace()],
    ) as session:
        client = GenerationClient(
            session,
            route,
            sampling=SamplingConfig(max_new_tokens=num_tokens),
            stop_token_ids=[],
            token_timeout_s=SILENCE_S,
        )
        engine, process, wall = cpu_seconds(), time.process_time(), time.monotonic()
        answers = await client.sample_group("0:a", PROMPT, seeds=range(num_answers))
        engine, process = cpu_seconds() - engine, time.process_time() - process
        wall = time.monotonic() - wall
    made = sum(len(answer.output_ids) for answer in answers)
    received = sum(len(body) for body in bodies.received)
    beside = process - engine if name == "hf" else process
    print(
        f"{name:8} {made} tokens in {wall:.0f} s; of each token made: {bodies.num_sent_tokens / made:.3f} sent, "
        f"{bodies.num_prefilled_tokens() / made:.4f} prefilled, {bodies.num_sent / made:.1f} bytes sent, "
        f"{received / made:.1f} received; {made / engine:.0f} tokens per CPU second of the engine, "
        f"{beside / made * 1e6:.0f} us of CPU beside it"
    )


@asynccontextmanager
async def serving_embedded(model: Path, *, num_answers: int, most_tokens: int) -> AsyncIterator[tuple[str, Any]]:
    engine = GenerationEngine(
        model, version="0.0", max_running_requests=num_answers, max_total_tokens=num_answers * most_tokens
    )
    server = EngineServer(engine, KEY, "127.0.0.1", tls=trust().server())
    url = await server.start()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "generation-engine"]

    def cpu_seconds() -> float:
        [times] = [times for times in psutil.Process().threads() if times.id == thread.native_id]
        return float(times.user_time + times.system_time)

    try:
        yield url, cpu_seconds
    finally:
        await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--sglang", action="store_true")
    arguments = parser.parse_args()
    disable_progress_bar()
    size = {"num_answers": arguments.answers, "num_tokens": arguments.tokens}
    most_tokens = len(PROMPT) + arguments.tokens + 16  # of which SGLang leaves some out
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random_model(folder / "model", context_length=most_tokens)

        async def embedded() -> None:
            async with serving_embedded(folder / "model", num_answers=arguments.answers, most_tokens=most_tokens) as (
                url,
                cpu_seconds,
            ):
                await measure("hf", url, cpu_seconds, **size)

        asyncio.run(embedded())
        if arguments.sglang:
            with serving_sglang(
                folder / "model",
                folder,
                dtype="float32",
                max_running_requests=arguments.answers,
                keeps_prompts=True,
            ) as server:
                asyncio.run(measure("sglang", server.url, server.cpu_seconds, **size))


if __name__ == "__main__":
    main()
