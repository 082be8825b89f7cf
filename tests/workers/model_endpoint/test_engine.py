"""A program talks to the model itself, by two embedded engines that take turns."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.server import EngineServer
from tests.chat_models import VOCABULARY, write_chat_tokenizer
from tests.workers.engine.tiny_models import load_reference, reference_logprobs, save_tiny_model
from tests.workers.model_endpoint.rig import DEADLINE_S, rig
from tests.workers.trusted import trust


def test_what_is_logged_is_what_the_model_said(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", vocab_size=len(VOCABULARY))
    asyncio.run(_converse(tmp_path, write_chat_tokenizer(model, "llama")))


async def _converse(folder: Path, model: Path) -> None:
    async with asyncio.timeout(2 * DEADLINE_S), AsyncExitStack() as stack:
        urls = []
        for seed in (1, 2):
            engine = GenerationEngine(model, seed=seed, version=f"0.{seed}")
            server = EngineServer(engine, "key", "127.0.0.1", tls=trust().server())
            stack.push_async_callback(server.stop)
            urls.append(await server.start())
        made = await stack.enter_async_context(rig(folder, model, urls, max_new_tokens=12))
        session = made.session()
        client = made.program(made.endpoint.open_episode(session))
        messages: list[Any] = [{"role": "user", "content": "1+1?"}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="any", messages=messages)
            chunks = await client.chat.completions.create(model="any", messages=messages, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
            assert text == reply.choices[0].message.content
            messages += [reply.choices[0].message, {"role": "user", "content": "Sure?"}]
    assert [len(branch.segments) for branch in session.log.branches] == [4, 4]
    reference = load_reference(model)
    for branch in session.log.branches:
        before: list[int] = []
        for segment in branch.segments:
            if segment.answer is not None:
                expected = reference_logprobs(reference, before, segment.ids)
                assert segment.answer.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
            before += segment.ids
    versions = {
        span.version
        for branch in session.log.branches
        for each in branch.segments
        if each.answer
        for span in each.answer.spans
    }
    assert versions == {"0.1", "0.2"}
