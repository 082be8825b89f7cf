"""The stream of a generation server: bytes -> server-sent events -> StreamEvent, each with the tokens since the last.

    data: {"output_ids": [...], "meta_info": {...}}  ...  data: {"error": {"message": ..., "code": ...}}  data: [DONE]

Of SGLang's fields those that are read here; both backends send them.
"""

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, Final

import msgspec

_BEGIN, _END = b"data: ", b"\n\n"
NOT_FINITE: Final = "not_finite"
"""Why an answer is aborted of which the model's logits are not finite, and why its prompt is then dropped."""


class FinishReason(msgspec.Struct):
    type: str
    """stop, length or abort."""
    status_code: int | None = None
    """Of an abort, where the server has given the request up for a reason of its own."""
    err_type: str | None = None
    """Of an abort: `NOT_FINITE`, or what SGLang says."""
    message: str = ""


class WeightVersions(msgspec.Struct):
    """The version of the weights that generated the tokens from `start` to the one before `end`."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct):
    completion_tokens: int
    """Of the request, with those of this event."""
    output_token_logprobs: list[tuple[float, int, Any]]
    finish_reason: FinishReason | None
    weight_version: str = ""
    """That the server has now."""
    weight_versions: list[WeightVersions] | None = None
    """Of all tokens of the request; SGLang says them at its end."""
    routed_experts: str | None = None
    """See `AnswerExperts`; at the end of the request."""


class Failure(msgspec.Struct):
    message: str
    code: int = 500
    """A status of HTTP; that of the reply is sent before anything can fail."""


class StreamEvent(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: MetaInfo | None = None
    error: Failure | None = None


async def stream_events(pieces: AsyncIterable[bytes]) -> AsyncIterator[StreamEvent]:
    """The events of a reply, which comes in pieces of any size.

    Raises:
        msgspec.MsgspecError: if one lacks or garbles a field.
    """
    buffer = bytearray()
    async for piece in pieces:
        searched = max(0, len(buffer) - 1)  # an event of many experts comes in many pieces
        buffer += piece
        while (end := buffer.find(_END, searched)) >= 0:
            data = bytes(buffer[:end]).removeprefix(_BEGIN)
            del buffer[: end + len(_END)]
            searched = 0
            if data != b"[DONE]":
                yield msgspec.json.decode(data, type=StreamEvent)
