"""One episode of two turns with a tool, played through each door to the model: the same is trained, token for token.

Session of an agent ──────────► token ids ─────────────────────────────┐
OpenAI's client, in a program ──► messages ──► the endpoint's template ┼──► log ──► sequence, mask, logprobs, versions
harness of an environment ──────► messages ──► the endpoint's template ┘
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from corral.agents import Session, Task
from tests.chat_models import ADD, TWO_TURNS, ids_of, write_chat_tokenizer
from tests.environment_packages.two_turns import QUESTION, play
from tests.environments import PACKAGES, environment, needs_environments
from tests.workers.rollout.rollout_rig import FakeGenerationServer, RolloutRig

ASKED = [{"role": "user", "content": QUESTION}]
SAID = "It is zz2."


class TwoTurns(FakeGenerationServer):
    """Answers the question with a call, and what follows exactly that with an answer, of the next weights."""

    def __init__(self, form: str) -> None:
        super().__init__()
        asked, called, result, said = TWO_TURNS[form]
        self._answers = {tuple(asked): (called, "0.0"), tuple([*asked, *called, *result]): (said, "0.1")}
        self.most_tokens = 300

    def _answer(self, ids: list[int]) -> tuple[list[int], str]:
        return self._answers[tuple(ids)]

    def _event(self, ids: list[int], wanted: int) -> dict[str, Any]:
        output, version = self._answer(ids)
        return {
            "output_ids": output,
            "meta_info": {
                "output_token_logprobs": [[-token / 8, token, None] for token in output],
                "weight_versions": [{"version": version, "start": 0, "end": len(output)}],
                "finish_reason": {"type": "stop"},
                "completion_tokens": len(output),
            },
        }


async def by_session(task: Task, session: Session) -> float:
    session = session.branch(history=[])
    await session.say(ASKED, tools=[ADD])
    first = await session.generate()
    [call] = first.tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 1})
    await session.say([{"role": "tool", "tool_call_id": call.id, "content": "2"}])
    return float((await session.generate()).text == SAID)


async def by_openai(task: Task, session: Session) -> float:
    endpoint = session.endpoint
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        return float(await play(client, ADD) == SAID)


DOORS = {
    "session": {"agent": f"{__name__}:by_session"},
    "openai": {"agent": f"{__name__}:by_openai"},
    "environment": {"environment": environment("two_turns")},
}


def played(
    folder: Path, form: str, rollout: Mapping[str, Any], server: TwoTurns
) -> tuple[Mapping[str, Any], list[list[tuple[str, int, int]]]]:
    """What is delivered of one episode, and with which versions."""
    settings = {"sampling": {"max_new_tokens": 300}, "agent_processes": 1, "reward_retries": 0, **rollout}
    fields = [{"task": {"id": "one", "prompt": QUESTION, "tool": ADD}}]
    rig = RolloutRig(
        folder, [ASKED], rollout=settings, group_size=1, max_prompt_tokens=99, server=server, fields=fields
    )
    write_chat_tokenizer(folder / "model", form)
    with rig:
        rig.run_until(lambda: len(rig.received) == 1, "the episode")
    assert rig.outcomes() == {"0": "finished"} and server.num_requests == 2
    [header] = rig.received
    return rig.tensors[0], [[(span.version, span.start, span.end) for span in spans] for spans in header.version_spans]


@needs_environments
# What a template does to turns is in test_episodes.py and test_chat.py; here a second form shows no other door.
@pytest.mark.parametrize("form", ["qwen", pytest.param("llama", marks=pytest.mark.slow)])
def test_an_episode_is_the_same_through_every_door(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(PACKAGES), os.environ.get("PYTHONPATH", ""))))
    asked, called, result, said = TWO_TURNS[form]
    ids = [*asked, *called, *result, *said]
    given = [*[True] * len(asked), *[False] * len(called), *[True] * len(result), *[False] * len(said)]
    logprobs = [0.0 if is_given else -token / 8 for token, is_given in zip(ids[1:], given[1:], strict=True)]
    for door, rollout in DOORS.items():
        (folder := tmp_path / door).mkdir()
        tensors, versions = played(folder, form, rollout, TwoTurns(form))
        np.testing.assert_array_equal(tensors["input_ids"], ids, err_msg=door)
        np.testing.assert_array_equal(tensors["prompt_mask"], given, err_msg=door)
        np.testing.assert_array_equal(tensors["old_logprobs"], np.float32(logprobs), err_msg=door)
        np.testing.assert_array_equal(tensors["rewards"], [1.0], err_msg=door)
        made = len(called), len(called) + len(said)
        assert versions == [[("0.0", 0, made[0]), ("0.1", *made)]], door


class CallsOnce(TwoTurns):
    """Answers whatever is asked with a call, then with an answer."""

    def _answer(self, ids: list[int]) -> tuple[list[int], str]:
        return (CALLED, "0.0") if self.num_requests == 1 else (ANSWERED, "0.0")


CALLED = ids_of("<tool_call>", '\n{"name":"adder_add", "arguments": {"a":1,"b":1}}\n', "</tool_call>", "<|im_end|>")
ANSWERED = ids_of("It is 2.", "<|im_end|>")


@needs_environments
@pytest.mark.slow
def test_the_loop_of_verifiers_with_a_tool_server_is_one_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    rollout = {"environment": environment("adder_tools")}
    tensors, versions = played(tmp_path, "qwen", rollout, CallsOnce("qwen"))
    given, ids = tensors["prompt_mask"], tensors["input_ids"]
    np.testing.assert_array_equal(ids[~given], [*CALLED, *ANSWERED])
    np.testing.assert_array_equal(ids[-len(ANSWERED) :], ANSWERED)
    np.testing.assert_array_equal(tensors["rewards"], [1.0])
    made = len(CALLED), len(CALLED) + len(ANSWERED)
    assert versions == [[("0.0", 0, made[0]), ("0.0", *made)]]
