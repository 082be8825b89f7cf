"""Whatever programs say in whatever order: each token that was made is trained once, as it was made, and only there."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chat_models import ADD, VOCABULARY, ids_of, write_chat_tokenizer
from tests.workers.model_endpoint.rig import DEADLINE_S, scripted

# Of each request: the conversation that it goes on from, how much of that is cut away, what is said then, and how many
# ask the same at the same time.
_LONGEST = 36  # tokens of an answer
_REQUESTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 2), st.sampled_from(["", "user", "tool", "system"]), st.integers(1, 2)),
    min_size=1,
    max_size=6,
)
_MADE = {
    "qwen": [
        ids_of("z", "z", "1", "<|im_end|>"),
        ids_of("<think>", "\nz", "z", "\n", "</think>", "\n\nz", "z", "2", "<|im_end|>"),
        ids_of("<tool_call>", '\n{"name": "add",  "arguments": {}}\n', "</tool_call>", "<|im_end|>"),
        ids_of("z", "z", "3" * 40, "<|im_end|>"),  # longer than an answer may be
    ],
    "llama": [
        ids_of("z", "z", "1", "<|eot|>"),
        ids_of('{"name": "add",  "parameters": {}}', "<|eot|>"),
        ids_of("z", "z", "3" * 40, "<|eot|>"),
        ids_of(" z", "z", " ", "<|eot|>"),
    ],
}


@pytest.mark.parametrize("form", _MADE)
@given(requests=_REQUESTS, answers=st.lists(st.integers(0, 3), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_made_token_is_trained_in_one_branch_as_it_was_made(
    tmp_path: Path, form: str, requests: Sequence[tuple[int, int, str, int]], answers: Sequence[int]
) -> None:
    model = write_chat_tokenizer(tmp_path / "model", form)
    asyncio.run(_play(tmp_path, model, form, requests, answers))


async def _play(
    folder: Path, model: Path, form: str, requests: Sequence[tuple[int, int, str, int]], answers: Sequence[int]
) -> None:
    made: list[list[int]] = []

    def answer(prompt_ids: list[int]) -> list[int]:
        made.append(_MADE[form][answers[len(made) % len(answers)]])
        return made[-1]

    known: list[list[dict[str, Any]]] = [[{"role": "user", "content": "1+1?"}]]
    async with (
        asyncio.timeout(DEADLINE_S),
        scripted(folder, model, answer, max_new_tokens=_LONGEST) as (rig, _),
    ):
        session = rig.session()
        headers = {"Authorization": f"Bearer {rig.endpoint.open_episode(session)}"}
        async with aiohttp.ClientSession(rig.endpoint.url, headers=headers) as http:
            for whose, cut, role, times in requests:
                history = known[whose % len(known)]
                messages = [*history[: max(1, len(history) - cut)], *([{"role": role, "content": "q"}] if role else [])]
                replies = await asyncio.gather(*(_ask(http, messages) for _ in range(times)))
                known += [[*messages, reply] for reply in replies if reply is not None]
    branches = session.log.branches
    trained = Counter(tuple(each.ids) for branch in branches for each in branch.segments if each.is_trained)
    assert trained == Counter(tuple(ids[:_LONGEST]) for ids in made)
    if form == "llama":  # whose template rewrites nothing, and what was never changed never became tokens again
        assert not any(VOCABULARY["zz"] in branch.ids for branch in branches)


async def _ask(http: aiohttp.ClientSession, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The answer; None where the template refuses these messages."""
    async with http.post("/v1/chat/completions", json={"messages": messages, "tools": [ADD]}) as response:
        reply = await response.json()
    if response.status == 400:
        assert "the system speaks first" in reply["error"]["message"]
        return None
    return dict(reply["choices"][0]["message"])
