"""Programs that know nothing of training talk to the endpoint by OpenAI's own client; what they said is in the log."""

import asyncio
import json
import logging
import stat
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.experiments.prompts import chat
from corral.experiments.trial.guarded_listener import GuardedListener
from corral.workers.engine.engine import GenerationEngine
from corral.workers.episodes.log import EpisodeLog
from corral.workers.episodes.trajectories import JudgedEpisode, make_sample
from corral.workers.model_endpoint import endpoint
from corral.workers.model_endpoint.endpoint import Conversations
from corral.workers.rollout.episode_session import EpisodeSession
from tests.chat_models import ADD, ENDS, TWO_TURNS, VOCABULARY, ids_of, write_chat_tokenizer
from tests.strangers import asking, check_only_the_silent_are_closed
from tests.workers.engine.tiny_models import load_reference, reference_logprobs, save_tiny_model
from tests.workers.model_endpoint.rig import DEADLINE_S, MAX_MODEL_LEN, Rig, ScriptedServer, rig, scripted
from tests.workers.rollout.engine_servers import serving

Play = Callable[[Rig, ScriptedServer], Awaitable[None]]
ASKED = {"role": "user", "content": "1+1?"}


def play(
    folder: Path, form: str | None, answers: Sequence[Sequence[int]], program: Play, *, ends: str | None = None
) -> None:
    """Run a program against a model that gives these answers, one after the other, the last one again and again.

    Args:
        ends: what ends an answer as the model declares it; None takes the template's.
    """
    left = list(answers)

    def answer(prompt_ids: list[int]) -> Sequence[int]:
        return left.pop(0) if len(left) > 1 else left[0]

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), scripted(folder, model, answer) as (rig, server):
            await program(rig, server)

    model = write_chat_tokenizer(folder / "model", form)
    if ends is not None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids_of(ends)}))
    asyncio.run(run())


def test_a_connection_without_the_key_of_an_episode_is_closed_and_one_with_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "GuardedListener", partial(GuardedListener, timeout_s=3.0))

    async def program(rig: Rig, server: ScriptedServer) -> None:
        ask = asking("/v1/models", rig.endpoint.open_episode(rig.session()))
        address = ("127.0.0.1", urlsplit(rig.endpoint.url).port or 0)
        await asyncio.to_thread(check_only_the_silent_are_closed, address, None, ask)

    play(tmp_path, "qwen", [[7]], program)


def sequences(log: EpisodeLog) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """Of each branch: its ids; and of what is trained, where it stands, its log-probabilities and versions."""
    found = []
    for branch in log.branches:
        data = make_sample("0:a", [JudgedEpisode([branch], 1.0)]).data
        ids, given = data["input_ids"].tolist(), data["prompt_mask"].tolist()
        trained = [place for place, is_given in enumerate(given) if not is_given]
        logprobs, versions = data["old_logprobs"].tolist(), data["versions"].tolist()
        found.append((ids, trained, [logprobs[t - 1] for t in trained], [versions[t - 1] for t in trained]))
    return found


def expected(*parts: tuple[list[int], int | None]) -> tuple[list[int], list[int], list[float], list[int]]:
    """A branch by hand: tokens, and the version that made them or None where they were given."""
    ids, trained, logprobs, versions = list[int](), list[int](), list[float](), list[int]()
    for tokens, version in parts:
        if version is not None:
            trained += range(len(ids), len(ids) + len(tokens))
            logprobs += [-token / 8 for token in tokens]
            versions += [version] * len(tokens)
        ids += tokens
    return ids, trained, logprobs, versions


def test_a_history_that_the_template_rewrites_is_a_new_branch(tmp_path: Path) -> None:
    thought = ids_of("<think>", "\nhm\n", "</think>", "\n\n", "z", "z", "2", "<|im_end|>")
    start, end = ["<|im_start|>"], ["<|im_end|>", "\n"]
    asked = ids_of(*start, "user\n1+1?", *end, *start, "assistant\n")
    again = ids_of(*start, "user\n1+1?", *end, *start, "assistant\n", "zz", "2", *end)
    again += ids_of(*start, "user\nSure?", *end, *start, "assistant\n")
    sessions: list[EpisodeSession] = []

    async def program(rig: Rig, server: ScriptedServer) -> None:
        sessions.append(rig.session())
        client = rig.program(rig.endpoint.open_episode(sessions[0]))
        messages: list[Any] = [ASKED]
        for question in ("Sure?", ""):
            reply = await client.chat.completions.create(model="any", messages=messages)
            message = reply.choices[0].message
            assert message.content == "zz2" and message.model_dump()["reasoning_content"] == "hm"
            messages += [message, {"role": "user", "content": question}]

    play(tmp_path, "qwen", [thought], program)
    assert sequences(sessions[0].log) == [
        expected((asked, None), (thought, 0)),
        expected((again, None), (thought, 0)),
    ]


@pytest.mark.parametrize("change", ["content", "reasoning_content", "arguments"])
def test_a_history_that_the_program_rewrites_is_a_new_branch(tmp_path: Path, change: str) -> None:
    _, called, _, said = TWO_TURNS["qwen"]

    async def program(rig: Rig, server: ScriptedServer) -> None:
        session = rig.session()
        client = rig.program(rig.endpoint.open_episode(session))
        reply = await client.chat.completions.create(model="any", messages=[ASKED], tools=[ADD])
        message: Any = reply.choices[0].message.model_dump(exclude_none=True)
        if change == "arguments":
            message["tool_calls"][0]["function"]["arguments"] = '{"b":1,"a":1}'  # the same object
        elif change == "content":
            message["content"] = "Well."
        else:
            del message["reasoning_content"]
        messages = [ASKED, message, {"role": "tool", "tool_call_id": "x", "content": "2"}]
        await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
        assert len(session.log.branches) == (1 if change == "arguments" else 2)

    play(tmp_path, "qwen", [called, said], program)


@pytest.mark.parametrize("form", TWO_TURNS)
def test_a_stream_says_what_a_reply_says(tmp_path: Path, form: str) -> None:
    _, called, _, said = TWO_TURNS[form]

    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        kwargs: dict[str, Any] = {"model": "any", "messages": [ASKED], "tools": [ADD], "logprobs": True}
        for _ in range(2):
            reply = await client.chat.completions.create(**kwargs)
            chunks = await client.chat.completions.create(**kwargs, stream=True, stream_options={"include_usage": True})
            text, reasoning, calls, reasons, usage, logprobs = "", "", list[Any](), list[Any](), None, list[Any]()
            async for chunk in chunks:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reasoning += choice.delta.model_dump().get("reasoning_content") or ""
                    calls += [(one.id, one.function) for one in choice.delta.tool_calls or []]
                    reasons += [choice.finish_reason] if choice.finish_reason else []
                    logprobs += (choice.logprobs.content or []) if choice.logprobs else []
            (whole,) = reply.choices
            assert text == (whole.message.content or "")
            assert reasoning == whole.message.model_dump().get("reasoning_content", "")
            assert [(id, call.model_dump()) for id, call in calls] == [
                (one.id, one.model_dump()["function"]) for one in whole.message.tool_calls or []
            ]
            assert (reasons, usage) == ([whole.finish_reason], reply.usage)
            assert whole.logprobs is not None and logprobs == whole.logprobs.content

    play(tmp_path, form, [called, called, said], program)


def test_text_and_ids_are_completed(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        session = rig.session()
        client = rig.program(rig.endpoint.open_episode(session))
        reply = await client.completions.create(model="any", prompt="1+1=", logprobs=1)
        (choice,) = reply.choices
        assert (choice.text, choice.finish_reason) == ("2 and more", "stop")
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens or []) == 11
        assert server.bodies[0]["input_ids"] == ids_of("<bos>", "1+1=")
        ids = [*ids_of("<bos>", "1+1="), *ids_of("2 and more", "<|im_end|>"), *ids_of("?")]
        cut = await client.completions.create(model="any", prompt=ids, max_tokens=3)
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("2 a", "length")
        pieces = await client.completions.create(model="any", prompt=ids, stop=["nd", "d m"], stream=True)
        chunks = [chunk async for chunk in pieces]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "2 a"
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
        assert len(session.log.branches) == 2  # the one that goes on, and another that goes on from the same place

    play(tmp_path, None, [ids_of("2 and more", "<|im_end|>")], program)


def test_a_stop_text_is_in_the_ids_and_not_in_the_text(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        session = rig.session()
        client = rig.program(rig.endpoint.open_episode(session))
        first = await client.chat.completions.create(model="any", messages=[ASKED], stop="nd")
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("2 a", "stop")
        messages: list[Any] = [ASKED, first.choices[0].message, {"role": "user", "content": "go on"}]
        await client.chat.completions.create(model="any", messages=messages)
        (branch,) = session.log.branches
        assert list(branch.segments[1].ids) == ids_of("2 and")
        assert branch.segments[2].ids[:2] == ids_of("<|eot|>", "<|head|>")

    play(tmp_path, "llama", [ids_of("2 and more", "<|eot|>")], program)


def test_an_answer_ends_where_the_template_ends_it_whatever_the_model_declares(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        reply = await client.chat.completions.create(model="any", messages=[ASKED])
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("2", "stop")
        assert reply.usage is not None and reply.usage.completion_tokens == 2

    play(tmp_path, "qwen", [ids_of("2", "<|im_end|>", " and on", "<|eot|>")], program, ends="<|eot|>")


def test_token_ids_go_in_and_out_as_vllm_has_it(tmp_path: Path) -> None:
    asked, called, result, said = TWO_TURNS["qwen"]

    async def program(rig: Rig, server: ScriptedServer) -> None:
        session = rig.session()
        headers = {"Authorization": f"Bearer {rig.endpoint.open_episode(session)}", "X-Session-ID": "some trace"}
        async with aiohttp.ClientSession(rig.endpoint.url, headers=headers) as http:
            async with http.get("/v1/models") as response:
                (model,) = (await response.json())["data"]
                assert (model["id"], model["max_model_len"]) == ("actor", MAX_MODEL_LEN)
            for prompt, output in ((asked, called), (asked + called + result, said)):
                params = {
                    "temperature": 0.3,
                    "max_tokens": 199,
                    "stop_token_ids": [*ids_of("<|im_end|>"), *ids_of(".")],
                    "logprobs": 1,
                    "skip_special_tokens": False,
                }
                body = {"model": "actor", "token_ids": prompt, "sampling_params": params}
                async with http.post("/inference/v1/generate", json=body) as response:
                    reply = await response.json()
                output = output[: output.index(ids_of(".")[0]) + 1] if ids_of(".")[0] in output else output
                (choice,) = reply["choices"]
                assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (0, output, "stop")
                assert choice["logprobs"] == {
                    "content": [{"token": f"token_id:{token}", "logprob": -token / 8} for token in output]
                }
                assert isinstance(reply["request_id"], str)
                sampling = server.bodies[-1]["sampling_params"]
                assert (sampling["temperature"], sampling["max_new_tokens"]) == (1.0, 199)
        assert sequences(session.log) == [expected((asked, None), (called, 0), (result, None), (said[:-1], 0))]

    play(tmp_path, "qwen", [called, said], program)


def test_limits_of_an_episode_are_errors_that_nobody_tries_again(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session(max_turns=1)))
        await client.chat.completions.create(model="any", messages=[ASKED])
        with pytest.raises(openai.BadRequestError, match="has had its 1 turns") as ended:
            await client.chat.completions.create(model="any", messages=[ASKED])
        assert ended.value.code == "episode_ended"
        long: Any = [{"role": "user", "content": "1" * 100}]
        client = rig.program(rig.endpoint.open_episode(rig.session(max_tokens=60)))
        with pytest.raises(openai.BadRequestError, match="leave no room for an answer") as ended:
            await client.chat.completions.create(model="any", messages=long)
        assert ended.value.code == "context_length_exceeded"
        long[0]["content"] = "1" * MAX_MODEL_LEN
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        with pytest.raises(openai.BadRequestError, match="leave no room for an answer"):
            await client.chat.completions.create(model="any", messages=long)
        long[0]["content"] = "1" * (MAX_MODEL_LEN - 100)
        reply = await client.chat.completions.create(model="any", messages=long)
        assert reply.usage is not None and reply.usage.total_tokens <= MAX_MODEL_LEN
        assert reply.choices[0].finish_reason == "length"
        assert len(server.bodies) == 2

    play(tmp_path, "qwen", [ids_of("1" * 90, "<|im_end|>")], program)


UNANSWERED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n is 2, and a request has one answer"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs are not kept"),
    ({"response_format": {"type": "json_object"}}, "response_format would sample"),
    ({"tools": [{"type": "function"}]}, r"tools \[0\] is no"),
    ({"max_tokens": 0}, "an answer has at least one token"),
    ({"messages": []}, "at least one"),
    ({"messages": [{"role": "robot", "content": ""}]}, "has role 'robot'"),
    ({"messages": [ASKED, {"role": "system", "content": "s"}]}, "the system speaks first"),
    ({"messages": "hello"}, "the body is no ChatRequest"),
    ({"parallel_tool_calls": False}, "the field parallel_tool_calls is not heeded; it is always true here"),
    ({"functions": [{"name": "f"}]}, "the field functions is not heeded; leave it out"),
    ({"modalities": ["text", "audio"]}, "the field modalities is not heeded"),
    ({"reasoning_effort": "low"}, "chat_template_kwargs: .* takes no argument 'reasoning_effort'"),
    ({"stream_options": {"continuous_usage_stats": True}, "stream": True}, "continuous_usage_stats is not heeded"),
    *(
        ({"extra_body": {name: value}}, f"the field {name} is not heeded")
        for name, value in {
            "add_generation_prompt": False,
            "best_of": 2,
            "continue_final_message": True,
            "guided_json": {"type": "object"},
            "include_reasoning": False,
            "min_tokens": 5,
            "return_token_ids": True,
            "separate_reasoning": False,
            "skip_special_tokens": True,
            "some_field_of_tomorrow": 1,
        }.items()
    ),
    ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs: .*no argument"),
]


def test_what_cannot_be_answered_is_refused_in_openais_form(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        for asked, words in UNANSWERED:
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                await client.chat.completions.create(**{"model": "any", "messages": [ASKED], **asked})
            assert refused.value.type == "invalid_request_error"
        assert not server.bodies

    play(tmp_path, "qwen", [[1]], program)


def test_fields_that_keep_books_ask_for_nothing_or_say_how_is_sampled_are_passed_over(tmp_path: Path) -> None:
    books = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    sampling = {"temperature": 0.1, "top_p": 0.5, "seed": 3, "frequency_penalty": 1.0, "presence_penalty": 1.0}
    asks_nothing: dict[str, Any] = {
        "best_of": 1,
        "min_tokens": 0,
        "ignore_eos": False,
        "guided_json": None,
        "echo": False,
    }
    as_done = {"add_generation_prompt": True, "continue_final_message": False, "skip_special_tokens": False, "top_k": 5}

    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        asked: dict[str, Any] = {
            "model": "any",
            "parallel_tool_calls": True,
            "modalities": ["text"],
            **books,
            **sampling,
        }
        reply = await client.chat.completions.create(
            messages=[ASKED], logit_bias={}, extra_body=asks_nothing | as_done, **asked
        )
        assert reply.choices[0].message.content == "2"
        assert server.bodies[0]["sampling_params"]["temperature"] == 1.0

    play(tmp_path, "qwen", [ids_of("2", "<|im_end|>")], program)


def test_a_last_message_of_the_assistant_is_gone_on_with_and_a_program_may_say_so(tmp_path: Path) -> None:
    messages: Any = [ASKED, {"role": "assistant", "content": "Let"}]

    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        says_so = {"continue_final_message": True, "add_generation_prompt": False}
        await client.chat.completions.create(model="any", messages=messages, extra_body=says_so)
        assert server.bodies[-1]["input_ids"][-3:] == ids_of("Let")
        for name, value in {"continue_final_message": False, "add_generation_prompt": True}.items():
            with pytest.raises(openai.BadRequestError, match=f"the field {name} is not heeded; it is always"):
                await client.chat.completions.create(model="any", messages=messages, extra_body={name: value})

    play(tmp_path, "qwen", [ids_of("2", "<|im_end|>")], program)


def test_tokens_that_a_chat_or_a_completion_asks_to_stop_at_end_the_answer(tmp_path: Path) -> None:
    stop = {"stop_token_ids": ids_of("n")}

    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        reply = await client.chat.completions.create(model="any", messages=[ASKED], extra_body=stop)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("2 an", "stop")
        completion = await client.completions.create(model="any", prompt="1+1=", extra_body=stop)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("2 an", "stop")

    play(tmp_path, "qwen", [ids_of("2 and more", "<|im_end|>")], program)


def test_arguments_of_the_template_hold_for_their_request_and_its_history(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        "{% if add_generation_prompt and short is defined and short %}In short: {% endif %}"
    )

    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        asked = ids_of("<|im_start|>", "user\n1+1?", "<|im_end|>", "\n", "<|im_start|>", "assistant\n")
        for kwargs in ({"short": True}, {"short": False}, {}):
            await client.chat.completions.create(
                model="any", messages=[ASKED], extra_body={"chat_template_kwargs": kwargs}
            )
            behind = ids_of("In short: ") if kwargs.get("short") else []
            assert server.bodies[-1]["input_ids"] == asked + behind
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs: .* takes no argument 'long'"):
            await client.chat.completions.create(
                model="any", messages=[ASKED], extra_body={"chat_template_kwargs": {"long": True}}
            )

    write_chat_tokenizer(tmp_path / "model", "qwen")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    play(tmp_path, "qwen", [ids_of("2", "<|im_end|>")], program)


def test_ids_of_the_model_that_its_tokenizer_has_no_text_for_are_a_legal_prompt(tmp_path: Path) -> None:
    size = len(VOCABULARY) + 40
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": size}))

    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        said = (await client.chat.completions.create(model="any", messages=[ASKED])).choices[0].message
        again: Any = [ASKED, said, ASKED]
        await client.chat.completions.create(model="any", messages=again)
        assert size - 1 in server.bodies[-1]["input_ids"]
        await client.completions.create(model="any", prompt=[size - 1])
        with pytest.raises(openai.BadRequestError, match=f"each an id below {size}"):
            await client.completions.create(model="any", prompt=[size])

    play(tmp_path, "qwen", [[*ids_of("2"), size - 1, *ids_of("<|im_end|>")]], program)


def test_special_tokens_that_end_no_answer_are_a_part_of_its_text(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        completion = await client.completions.create(model="any", prompt="1+1=")
        assert completion.choices[0].text == "<|head|>2<|body|>"
        cut = await client.completions.create(model="any", prompt="1+1=", stop="<|body|>")
        assert cut.choices[0].text == "<|head|>2"
        reply = await client.chat.completions.create(model="any", messages=[ASKED])
        assert reply.choices[0].message.content == "<|head|>2<|body|>"

    play(tmp_path, "qwen", [ids_of("<|head|>", "2", "<|body|>", "<|im_end|>")], program)


@pytest.mark.parametrize("num_messages", [1, 500])
def test_a_text_that_cannot_fit_is_refused_before_it_becomes_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_messages: int
) -> None:
    def encode(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("it was to be refused before")

    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        monkeypatch.setattr(chat, "encode_answer", encode)
        monkeypatch.setattr(endpoint, "encode_prompt", encode)
        messages: Any = [{"role": "user", "content": "1+" * (100_000 // num_messages)}] * num_messages
        for asked in (
            client.chat.completions.create(model="any", messages=messages),
            client.completions.create(model="any", prompt="1+" * 100_000),
            client.completions.create(model="any", prompt=[5] * (MAX_MODEL_LEN + 1)),
        ):
            with pytest.raises(openai.BadRequestError, match="leave no room for an answer") as refused:
                await asked
            assert refused.value.code == "context_length_exceeded"
        assert not server.bodies

    play(tmp_path, "qwen", [[1]], program)


def test_a_request_that_is_too_large_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        with pytest.raises(openai.BadRequestError, match="a request of more than 1000 bytes leave no room") as refused:
            await client.completions.create(model="any", prompt=[5] * 1000)
        assert refused.value.code == "context_length_exceeded"
        assert not server.bodies

    monkeypatch.setattr(endpoint, "_MAX_BODY_BYTES", 1000)
    play(tmp_path, "qwen", [[1]], program)


def test_a_prompt_that_takes_long_to_read_holds_up_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, prompt_ids = threading.Event(), Conversations.prompt_ids

    def slow(self: Conversations, messages: Any, *, tools: Any) -> list[int]:
        if messages[0]["content"] == "slow":
            assert may_go_on.wait(DEADLINE_S)
        return prompt_ids(self, messages, tools=tools)

    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        long: Any = [{"role": "user", "content": "slow"}]
        waiting = asyncio.create_task(client.chat.completions.create(model="any", messages=long))
        await client.chat.completions.create(model="any", messages=[ASKED])
        assert not waiting.done()
        may_go_on.set()
        assert (await waiting).choices[0].message.content == "2"

    monkeypatch.setattr(Conversations, "prompt_ids", slow)
    play(tmp_path, "qwen", [ids_of("2", "<|im_end|>")], program)


def test_without_a_template_nobody_chats(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        with pytest.raises(openai.BadRequestError, match="has no chat template; ask /v1/completions"):
            await client.chat.completions.create(model="any", messages=[ASKED])
        with pytest.raises(openai.NotFoundError, match="POST /v1/responses; what is answered here is /v1/chat/comp"):
            await client.responses.create(model="any", input="x")
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="any", input="x")

    play(tmp_path, None, [[1]], program)


def test_calls_are_left_alone_where_the_program_wants_none(tmp_path: Path) -> None:
    _, called, _, _ = TWO_TURNS["llama"]

    async def program(rig: Rig, server: ScriptedServer) -> None:
        client = rig.program(rig.endpoint.open_episode(rig.session()))
        reply = await client.chat.completions.create(model="any", messages=[ASKED], tools=[ADD], tool_choice="none")
        assert reply.choices[0].message.tool_calls is None
        assert (reply.choices[0].message.content or "").startswith('{"name":"add"')

    play(tmp_path, "llama", [called], program)


def test_a_key_is_an_episode_and_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys: list[str] = []

    async def program(rig: Rig, server: ScriptedServer) -> None:
        first, second = rig.session(), rig.session()
        keys.extend(map(rig.endpoint.open_episode, (first, second)))
        await rig.program(keys[0]).chat.completions.create(model="any", messages=[ASKED])
        assert (first.log.num_turns, second.log.num_turns) == (1, 0)
        rig.endpoint.close_episode(keys[0])
        for wrong in (keys[0], keys[1] + "x", "none"):
            with pytest.raises(openai.AuthenticationError, match="names no episode that is open") as refused:
                await rig.program(wrong).chat.completions.create(model="any", messages=[ASKED])
            assert wrong not in str(refused.value)
        async with aiohttp.ClientSession(rig.endpoint.url) as http, http.get("/v1/models") as response:
            assert response.status == 401
        assert server.bodies[1:] == []

    play(tmp_path, "qwen", [ids_of("2", "<|im_end|>")], program)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("corral", "aiohttp"))]
    assert not any(key in line for key in keys for line in ours)


def test_closing_an_episode_ends_what_is_under_way(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        server.may_answer.clear()
        session = rig.session()
        key = rig.endpoint.open_episode(session)
        asking = asyncio.create_task(rig.program(key).chat.completions.create(model="any", messages=[ASKED]))
        await server.asked.wait()
        rig.endpoint.close_episode(key)
        with pytest.raises(openai.BadRequestError, match="closed before the answer was made") as ended:
            await asking
        assert ended.value.code == "episode_ended"
        assert session.log.branches == []

    play(tmp_path, "qwen", [ids_of("2", "<|im_end|>")], program)


def test_an_answer_whose_program_hangs_up_is_given_up(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        server.may_answer.clear()
        session = rig.session()
        client = rig.program(rig.endpoint.open_episode(session))
        asking = asyncio.create_task(client.chat.completions.create(model="any", messages=[ASKED]))
        await server.asked.wait()
        asking.cancel()
        await asyncio.wait([asking])
        server.may_answer.set()
        await client.chat.completions.create(model="any", messages=[ASKED])
        (branch,) = session.log.branches
        assert len(branch.segments) == 2

    play(tmp_path, "qwen", [ids_of("2", "<|im_end|>")], program)


def test_requests_at_the_same_time_are_branches_of_one_episode(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        session = rig.session()
        client = rig.program(rig.endpoint.open_episode(session))
        replies = await asyncio.gather(
            *(client.chat.completions.create(model="any", messages=[ASKED]) for _ in range(4))
        )
        assert {reply.choices[0].message.content for reply in replies} == {"2"}
        messages: list[Any] = [ASKED, replies[0].choices[0].message, {"role": "user", "content": "?"}]
        await asyncio.gather(*(client.chat.completions.create(model="any", messages=messages) for _ in range(2)))
        assert [len(branch.segments) for branch in session.log.branches] == [4, 4, 2, 2]

    play(tmp_path, "llama", [ids_of("2", "<|eot|>")], program)


def test_the_socket_reaches_where_no_network_is(tmp_path: Path) -> None:
    async def program(rig: Rig, server: ScriptedServer) -> None:
        path = tmp_path / "endpoint" / "socket"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        headers = {"Authorization": f"Bearer {rig.endpoint.open_episode(rig.session())}"}
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), headers=headers) as http:
            async with http.post("http://model/v1/chat/completions", json={"messages": [ASKED]}) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == "2"
        await rig.endpoint.stop()
        assert not path.exists()
        with pytest.raises(ValueError, match="a socket's path has at most 107 bytes"):
            await rig.endpoint.start(tmp_path / ("x" * 100) / "socket")
        path.parent.chmod(0o750)
        with pytest.raises(ValueError, match="is open to others"):
            await rig.endpoint.start(path)

    play(tmp_path, "qwen", [ids_of("2", ENDS["qwen"])], program)


# --- whatever programs say in whatever order ------------------------------------------------------------------------

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


# --- the model itself, by two embedded engines that take turns ------------------------------------------------------


def test_what_is_logged_is_what_the_model_said(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", vocab_size=len(VOCABULARY))
    asyncio.run(_converse(tmp_path, write_chat_tokenizer(model, "llama")))


async def _converse(folder: Path, model: Path) -> None:
    engines = [GenerationEngine(model, seed=seed, version=f"0.{seed}") for seed in (1, 2)]
    async with (
        asyncio.timeout(2 * DEADLINE_S),
        serving(*engines) as (urls, _),
        rig(folder, model, urls, max_new_tokens=12) as made,
    ):
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
