"""Replies of the model endpoint: a turn ──► JSON of OpenAI's chat or completions, or vLLM's of token ids.

A stream is the same reply in pieces, once it is made: reasoning and text in a few, each call whole, then why it ended.
"""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from corral.experiments.prompts.tokens import answer_text, token_bytes
from corral.workers.episodes.log import Turn

_PIECE = 256  # characters of a piece
Json = dict[str, Any]


def chat_reply(turn: Turn, message: Mapping[str, Any], *, model: str, tokenizer: Any) -> Json:
    """chat.completion, with one choice; with log-probabilities where there is a tokenizer, which has their texts."""
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if message.get("tool_calls") else _finish_reason(turn),
        "logprobs": None if tokenizer is None else {"content": _logprobs(turn, tokenizer), "refusal": None},
    }
    return _reply(turn, "chat.completion", choice, model=model)


def text_reply(turn: Turn, text: str, *, model: str, tokenizer: Any) -> Json:
    """text_completion, with one choice; the tokenizer as of `chat_reply`."""
    logprobs: Json | None = None
    if tokenizer is not None:
        tokens = _logprobs(turn, tokenizer)
        logprobs = {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": None,
            "text_offset": None,
        }
    choice = {"index": 0, "text": text, "finish_reason": _finish_reason(turn), "logprobs": logprobs}
    return _reply(turn, "text_completion", choice, model=model)


def ids_reply(turn: Turn) -> Json:
    """That of vLLM's /inference/v1/generate, which turn of the episode it is, and which weights made it."""
    answer = turn.answer
    logprobs = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(answer.output_ids, answer.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": answer.output_ids,
        "finish_reason": _finish_reason(turn),
        "logprobs": {"content": logprobs},
    }
    versions = [[span.version, span.start, span.end] for span in answer.spans]
    return {"request_id": _new_id("gen"), "turn": turn.number, "versions": versions, "choices": [choice]}


def events(reply: Json, *, says_usage: bool) -> Iterator[bytes]:
    """The server-sent events of a reply."""
    (choice,) = reply["choices"]
    is_chat = reply["object"] == "chat.completion"
    head = {key: reply[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if is_chat else reply["object"]
    deltas = _message_deltas(choice["message"]) if is_chat else ({"text": piece} for piece in _pieces(choice["text"]))
    for number, delta in enumerate(deltas):
        # All logprobs come with the first piece: a piece of text is no number of tokens.
        logprobs = choice["logprobs"] if number == 0 else None
        choice_head: Json = {"index": choice["index"], "finish_reason": None, "logprobs": logprobs}
        yield _event({**head, "choices": [{**choice_head, "delta": delta} if is_chat else {**choice_head, **delta}]})
    last: Json = {"index": choice["index"], "finish_reason": choice["finish_reason"], "logprobs": None}
    yield _event({**head, "choices": [{**last, "delta": {}} if is_chat else {**last, "text": ""}]})
    if says_usage:
        yield _event({**head, "choices": [], "usage": reply["usage"]})
    yield b"data: [DONE]\n\n"


def _message_deltas(message: Mapping[str, Any]) -> Iterator[Json]:
    yield {"role": "assistant", "content": "" if message["content"] is not None else None}
    for key in ("reasoning_content", "content"):
        yield from ({key: piece} for piece in _pieces(message.get(key) or ""))
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index, **call}]}


def _pieces(text: str) -> Iterable[str]:
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def _event(chunk: Json) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def _reply(turn: Turn, kind: str, choice: Json, *, model: str) -> Json:
    num_prompt, num_new = len(turn.prompt_ids), len(turn.answer.output_ids)
    return {
        "id": _new_id("chatcmpl" if kind == "chat.completion" else "cmpl"),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
    }


def _finish_reason(turn: Turn) -> str:
    return "stop" if turn.answer.stopped else "length"


def _logprobs(turn: Turn, tokenizer: Any) -> list[Json]:
    """Of each token that was made, the one that ended the answer included."""
    answer = turn.answer
    return [
        {
            "token": answer_text(tokenizer, [token]),
            "logprob": logprob,
            "bytes": list(token_bytes(tokenizer, token)),
            "top_logprobs": [],
        }
        for token, logprob in zip(answer.output_ids, answer.logprobs, strict=True)
    ]


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
